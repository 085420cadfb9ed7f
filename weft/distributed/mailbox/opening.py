"""How an engine opens a mailbox: one function for all kinds that live in real time."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal, get_args

from weft.distributed.mailbox.mailbox import AbstractMailbox
from weft.distributed.mailbox.sockets import FolderDirectory, open_sockets
from weft.distributed.secret import find_secret
from weft.errors import UsageError, nearest

__all__ = ["MailboxKind", "open_mailbox"]

MailboxKind = Literal["tcp", "shared_memory"]


def open_mailbox(
    kind: MailboxKind,
    folder: Path | str,
    address: int,
    *,
    secret: bytes | None = None,
    timeout: float = 30.0,
    interface: str = "lo",
    known: Collection[int] | None = None,
) -> AbstractMailbox:
    """Join the mailboxes that meet in a folder, as the peer with this address (a rank), at any time.

    Peers need not start together: whoever comes calls those who are there. The address of one that has died, or still
    holds on elsewhere, may be taken again; the others see a peer that has come back.

    Args:
        folder: where peers find each other; all can see it.
        secret: of the run; by default that of the environment (WEFT_SECRET) or of the folder.
        timeout: seconds after which a silent peer counts as lost; a dead one is seen at once.
        interface: for TCP, the network interface to listen on, by name or address.
        known: the addresses that peers may have; None for any.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     server = open_mailbox("tcp", folder, 0, secret=bytes(32))
    ...     worker = open_mailbox("tcp", folder, 1, secret=bytes(32))
    ...     worker.send(0, "push", {"step": 7})
    ...     print(server.receive("push").header)
    ...     worker.close()
    ...     server.close()
    {'step': 7}
    """
    if kind not in get_args(MailboxKind):
        raise UsageError(f"unknown kind of mailbox (kind: {kind}); {nearest(kind, get_args(MailboxKind))}")
    folder = Path(folder)
    return open_sockets(
        kind,
        FolderDirectory(folder),
        address,
        secret=find_secret(folder) if secret is None else secret,
        timeout=timeout,
        interface=interface,
        known=known,
    )
