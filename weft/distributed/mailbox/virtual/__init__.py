"""Mailboxes of the virtual cluster."""

from weft.distributed.mailbox.virtual.mailbox import VirtualMailbox

__all__ = ["VirtualMailbox"]
