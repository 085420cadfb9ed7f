"""From an address to an open mailbox: listen, enter the roll, take calls, call all who came before."""

from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from weft.distributed.group.shared_memory.rendezvous import Invitation
from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import endpoint_of, find_host, is_loopback, listen_here, listen_on
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.handshake import make_mark
from weft.distributed.mailbox.sockets.joining import Joining
from weft.distributed.mailbox.sockets.mailbox import SocketMailbox
from weft.distributed.mailbox.sockets.memory import SharedBodies
from weft.distributed.mailbox.sockets.switchboard import Settings, Switchboard
from weft.distributed.mailbox.sockets.windows import SharedWindows
from weft.errors import StorageError, UsageError

__all__ = ["MAX_MESSAGE_BYTES", "open_sockets"]

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
) -> SocketMailbox:
    """Open a mailbox for a new peer, or for one that comes back; returns when all who came before know of it.

    One who does not answer in time, and has not ended, is called again in the background.

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
    listener = listen_on(find_host(interface)) if is_tcp else listen_here()
    bodies = None if is_tcp else SharedBodies(lambda number: _invitation(directory.read(number)))
    memory = "" if bodies is None else str(bodies.invitation)
    try:
        number = directory.join(Member(address, endpoint_of(listener), memory, make_mark(secret)))
    except BaseException:
        listener.close()
        if bodies is not None:
            bodies.close()
        raise
    signs_bodies = is_tcp and not is_loopback(listener.getsockname()[0])
    settings = Settings(secret, timeout, max_bytes, signs_bodies, known)
    reception = Reception(address, number)
    switchboard = Switchboard(listener, reception, settings, bodies)
    windows = None if is_tcp else SharedWindows(directory)
    joining = Joining(directory, reception, switchboard, settings)

    def give_back() -> None:
        joining.stop()
        if bodies is not None:
            bodies.close()
        if windows is not None:
            windows.close()
        with suppress(OSError, StorageError):  # the folder may be gone
            directory.leave(number)

    mailbox = SocketMailbox(reception, switchboard, windows, bodies, give_back=give_back)
    switchboard.start()  # who comes after need not wait until all who came before have answered
    try:
        joining.call_all()
    except BaseException:
        mailbox.close()
        raise
    return mailbox


def _invitation(member: Member | None) -> Invitation | None:
    return Invitation.parse(member.memory) if member is not None and member.memory else None
