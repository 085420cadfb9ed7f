"""Mailboxes over sockets: TCP between hosts or processes, or shared memory between the processes of one host."""

import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.group.shared_memory.rendezvous import Invitation
from weft.distributed.mailbox.endpoint import AbstractEndpoint
from weft.distributed.mailbox.mailbox import AbstractMailbox
from weft.distributed.mailbox.monitor import ThreadMonitor
from weft.distributed.mailbox.receiver import Receiver
from weft.distributed.mailbox.roster import Roster, lost_peer
from weft.distributed.mailbox.send_work import lost_send
from weft.distributed.mailbox.sockets.connections import ConnectionSettings
from weft.distributed.mailbox.sockets.connector import find_earlier
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.endpoints import endpoint_of, find_host, is_loopback, listen_tcp, listen_unix
from weft.distributed.mailbox.sockets.handshake import make_fingerprint
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies
from weft.distributed.mailbox.sockets.transport import SocketTransport
from weft.errors import StorageError, UsageError

__all__ = ["open_sockets"]

MAX_MESSAGE_BYTES = 2**33


def open_sockets(
    kind: Literal["tcp", "shared_memory"],
    directory: AbstractDirectory,
    address: int,
    *,
    secret: bytes,
    timeout: float = 30.0,
    interface: str = "lo",
    known: Collection[int] | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> AbstractMailbox:
    """Open a mailbox for a new peer, or for one that comes back; returns when all who came before know of it.

    One that does not answer in time, and has not ended, is tried again in the background.

    Args:
        secret: of the run; it is used and never sent.
        timeout: seconds after which a silent peer counts as lost; a dead one is seen at once.
        interface: the one to listen on, by name or address. Beyond loopback, bodies are signed as well as heads.
        known: the addresses that peers may have; None for any.
        max_bytes: the largest message that is taken.
    """
    if address < 0 or (known is not None and address not in known):
        raise UsageError(f"address is not one of the run's (address: {address}); give a rank of the run")
    is_tcp = kind == "tcp"
    listener = listen_tcp(find_host(interface)) if is_tcp else listen_unix()
    bodies = None if is_tcp else SharedBodies(lambda number: _invitation(directory.read(number)))
    shared_memory = "" if bodies is None else str(bodies.invitation)
    try:
        number = directory.join(Member(address, endpoint_of(listener), shared_memory, make_fingerprint(secret)))
    except BaseException:
        listener.close()
        if bodies is not None:
            bodies.close()
        raise

    def leave() -> None:
        if bodies is not None:
            bodies.close()
        with suppress(OSError, StorageError):  # the folder may be gone
            directory.leave(number)

    signs_bodies = is_tcp and not is_loopback(listener.getsockname()[0])
    settings = ConnectionSettings(secret, timeout, max_bytes, signs_bodies, known)
    receiver = Receiver(address, number, monitor=ThreadMonitor(), roster=Roster())
    transport = SocketTransport(listener, receiver, settings, bodies)
    mailbox = _SocketMailbox(receiver, transport, bodies, leave)
    transport.start()  # whoever comes after need not wait until all who came before have answered
    try:
        transport.connect_all(find_earlier(directory, address, number))
    except BaseException:
        mailbox.close()
        raise
    return mailbox


def _invitation(member: Member | None) -> Invitation | None:
    return Invitation.parse(member.shared_memory) if member is not None and member.shared_memory else None


@final
class _SocketMailbox(AbstractEndpoint):
    """One peer. `leave` is called once, at the end."""

    def __init__(
        self, receiver: Receiver, transport: SocketTransport, bodies: SharedBodies | None, leave: Callable[[], None]
    ) -> None:
        super().__init__(receiver)
        self._transport = transport
        self._bodies = bodies
        self._closing = threading.Lock()
        self._close = weakref.finalize(self, _close, receiver, transport, leave)  # also when the interpreter ends

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


def _close(receiver: Receiver, transport: SocketTransport, leave: Callable[[], None]) -> None:
    receiver.close()
    transport.close()
    leave()
