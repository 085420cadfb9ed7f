"""Peers that come and go: what servers and elastic schemes talk through."""

from weft.distributed.mailbox.faulty import Duplicate, FaultyMailbox, MailFault
from weft.distributed.mailbox.local import LocalTransport
from weft.distributed.mailbox.mailbox import (
    FOREVER,
    JOINED,
    LEFT,
    AbstractMailbox,
    AbstractReceive,
    Message,
    Sources,
    Tags,
)
from weft.distributed.mailbox.part import PartMailbox
from weft.distributed.mailbox.recording import MailTraffic, MessageCount, RecordingMailbox
from weft.distributed.mailbox.sockets import MailboxKind, StoreDirectory, find_host, open_mailbox
from weft.distributed.mailbox.virtual import VirtualMailbox

__all__ = [
    "FOREVER",
    "JOINED",
    "LEFT",
    "AbstractMailbox",
    "AbstractReceive",
    "Duplicate",
    "FaultyMailbox",
    "LocalTransport",
    "MailFault",
    "MailTraffic",
    "MailboxKind",
    "Message",
    "MessageCount",
    "PartMailbox",
    "RecordingMailbox",
    "Sources",
    "StoreDirectory",
    "Tags",
    "VirtualMailbox",
    "find_host",
    "open_mailbox",
]
