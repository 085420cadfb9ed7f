"""Peers that come and go: what servers and elastic schemes talk through."""

from weft.distributed.mailbox.faulty import Corrupt, Duplicate, FaultyMailbox, MailFault
from weft.distributed.mailbox.local import LocalMailbox, LocalPost
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
from weft.distributed.mailbox.opening import MailboxKind, open_mailbox
from weft.distributed.mailbox.recording import MailTraffic, RecordingMailbox, Tally
from weft.distributed.mailbox.virtual import VirtualMailbox
from weft.distributed.mailbox.window import CHUNK, AbstractWindow

__all__ = [
    "CHUNK",
    "FOREVER",
    "JOINED",
    "LEFT",
    "AbstractMailbox",
    "AbstractReceive",
    "AbstractWindow",
    "Corrupt",
    "Duplicate",
    "FaultyMailbox",
    "LocalMailbox",
    "LocalPost",
    "MailFault",
    "MailTraffic",
    "MailboxKind",
    "Message",
    "RecordingMailbox",
    "Sources",
    "Tags",
    "Tally",
    "VirtualMailbox",
    "open_mailbox",
]
