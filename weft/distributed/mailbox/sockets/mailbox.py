"""Mailboxes over sockets: TCP between hosts or processes, or shared memory between the processes of one host."""

import threading
import weakref
from collections.abc import Collection
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, final, get_args

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.endpoint import AbstractEndpoint, lost_send
from weft.distributed.mailbox.mailbox import AbstractMailbox
from weft.distributed.mailbox.receiver import Receiver, Roster, ThreadMonitor, lost_peer
from weft.distributed.mailbox.sockets.connections import ConnectionSettings
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, FolderDirectory, Member
from weft.distributed.mailbox.sockets.endpoints import endpoint_of, find_host, is_loopback, listen_tcp, listen_unix
from weft.distributed.mailbox.sockets.handshake import make_fingerprint
from weft.distributed.mailbox.sockets.joining import find_earlier
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies
from weft.distributed.mailbox.sockets.transport import SocketTransport
from weft.errors import StorageError, UsageError, nearest
from weft.secret import find_secret

__all__ = ["MailboxKind", "open_mailbox"]

MailboxKind = Literal["tcp", "shared_memory"]
MAX_MESSAGE_BYTES = 2**33


def open_mailbox(
    kind: MailboxKind,
    directory: AbstractDirectory | Path | str,
    address: int,
    *,
    secret: bytes | None = None,
    timeout: float = 30.0,
    interface: str = "lo",
    known: Collection[int] | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> AbstractMailbox:
    """Join the mailboxes that meet in a directory, as the peer with this address (a rank), at any time.

    Returns when all who came before know of it; one that does not answer in time is called again in the background.
    Peers need not start together. The address of one that has died, or still holds on elsewhere, may be taken again;
    the others see a peer that has come back.

    Args:
        directory: where peers find each other: a folder that all can see, or a directory of another kind.
        secret: of the run; by default that of the environment (WEFT_SECRET) or of the folder. It is never sent.
        timeout: seconds after which a silent peer counts as lost; a dead one is seen at once.
        interface: for TCP, the network interface to listen on, by name or address. Beyond loopback, bodies are signed.
        known: the addresses that peers may have; None for any.
        max_bytes: the largest message that is taken.

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
    if address < 0 or (known is not None and address not in known):
        raise UsageError(f"address is not one of the run's (address: {address}); give a rank of the run")
    folder = None if isinstance(directory, AbstractDirectory) else Path(directory)
    secret = find_secret(folder) if secret is None else secret
    host = find_host(interface) if kind == "tcp" else None
    signs_bodies = host is not None and not is_loopback(host)
    settings = ConnectionSettings(secret, timeout, max_bytes, signs_bodies, known)
    found = directory if isinstance(directory, AbstractDirectory) else FolderDirectory(Path(directory))
    mailbox = _join(found, address, host, settings)
    try:
        mailbox.connect_all(find_earlier(found, address, mailbox.incarnation))
    except BaseException:
        mailbox.close()
        raise
    return mailbox


def _join(
    directory: AbstractDirectory, address: int, host: str | None, settings: ConnectionSettings
) -> "_SocketMailbox":
    """Listen on TCP at this host, or on a Unix socket with bodies in shared memory, and enter the directory."""
    with ExitStack() as undo:
        listener = listen_unix() if host is None else listen_tcp(host)
        undo.callback(listener.close)
        bodies = SharedBodies(directory.find_invitation) if host is None else None
        if bodies is not None:
            undo.callback(bodies.close)
        invitation = "" if bodies is None else str(bodies.invitation)
        member = Member(address, endpoint_of(listener), invitation, make_fingerprint(settings.secret))
        number = directory.join(member)
        undo.pop_all()
    receiver = Receiver(address, number, monitor=ThreadMonitor(), roster=Roster())
    transport = SocketTransport(listener, receiver, settings, bodies)
    mailbox = _SocketMailbox(receiver, transport, bodies, directory)
    transport.start()  # whoever comes after need not wait until all who came before have answered
    return mailbox


@final
class _SocketMailbox(AbstractEndpoint):
    """One peer of the directory."""

    def __init__(
        self, receiver: Receiver, transport: SocketTransport, bodies: SharedBodies | None, directory: AbstractDirectory
    ) -> None:
        super().__init__(receiver)
        self._transport = transport
        self._bodies = bodies
        self._closing = threading.Lock()
        self._close = weakref.finalize(self, _close, receiver, transport, bodies, directory)  # or when Python ends
        self.connect_all = transport.connect_all

    def _transmit(self, to: int, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        connection = self._transport.find(to)
        if connection is not None:
            return connection.send_message(tag, header, tensors)
        roster = self._receiver.roster
        return lost_send(lost_peer(to, "it has just left") if to in roster.present else roster.explain_absence(to))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype) if self._bodies is None else self._bodies.empty(shape, dtype)

    def close(self) -> None:
        with self._closing:  # whoever closes it too returns when it is closed
            self._close()


def _close(
    receiver: Receiver, transport: SocketTransport, bodies: SharedBodies | None, directory: AbstractDirectory
) -> None:
    receiver.close()
    transport.close()
    if bodies is not None:
        bodies.close()
    with suppress(OSError, StorageError):  # the folder may be gone
        directory.leave(receiver.incarnation)
