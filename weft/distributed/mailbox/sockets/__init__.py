"""Mailboxes over sockets: TCP, and shared memory on one host."""

from weft.distributed.mailbox.sockets.directory import AbstractDirectory, FolderDirectory, Member, StoreDirectory
from weft.distributed.mailbox.sockets.endpoints import find_host
from weft.distributed.mailbox.sockets.mailbox import MailboxKind, open_mailbox

__all__ = [
    "AbstractDirectory",
    "FolderDirectory",
    "MailboxKind",
    "Member",
    "StoreDirectory",
    "find_host",
    "open_mailbox",
]
