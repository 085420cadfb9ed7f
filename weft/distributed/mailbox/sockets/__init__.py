"""Mailboxes over sockets: TCP, and shared memory on one host."""

from weft.distributed.mailbox.sockets.directory import AbstractDirectory, FolderDirectory, Member, StoreDirectory
from weft.distributed.mailbox.sockets.mailbox import open_sockets

__all__ = ["AbstractDirectory", "FolderDirectory", "Member", "StoreDirectory", "open_sockets"]
