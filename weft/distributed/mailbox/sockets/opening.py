"""From an address to an open mailbox: listen, enter the roll, call all who came before."""

from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from weft.distributed.group.shared_memory.rendezvous import Invitation
from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import (
    call,
    connect,
    endpoint_of,
    find_host,
    is_loopback,
    listen_here,
    listen_on,
)
from weft.distributed.mailbox.sockets.directory import AbstractDirectory, Member
from weft.distributed.mailbox.sockets.handshake import Hello, make_mark
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
    number = directory.join(Member(address, endpoint_of(listener), memory, make_mark(secret)))
    signs_bodies = is_tcp and not is_loopback(listener.getsockname()[0])
    settings = Settings(secret, timeout, max_bytes, signs_bodies, known)
    reception = Reception(address, number)
    switchboard = Switchboard(listener, reception, settings, bodies)
    windows = None if is_tcp else SharedWindows(directory)

    def give_back() -> None:
        if bodies is not None:
            bodies.close()
        if windows is not None:
            windows.close()
        with suppress(OSError, StorageError):  # the folder may be gone
            directory.leave(number)

    mailbox = SocketMailbox(reception, switchboard, windows, bodies, give_back=give_back)
    try:
        _call_all(directory, reception, switchboard, settings)
    except BaseException:
        switchboard.start()
        mailbox.close()
        raise
    switchboard.start()
    return mailbox


def _call_all(directory: AbstractDirectory, reception: Reception, switchboard: Switchboard, settings: Settings) -> None:
    """Call the last life of every peer that came before. One that does not answer has gone."""
    last: dict[int, int] = {}
    members = {number: directory.read(number) for number in range(reception.incarnation)}
    for number, member in members.items():
        if member is not None:
            last[member.address] = number
    for peer, number in last.items():
        member = members[number]
        if member is None or member.has_left or peer == reception.address:
            continue
        try:
            connection = connect(member.endpoint, settings.timeout)
        except OSError:
            continue
        hello = Hello(reception.address, reception.incarnation, peer, number, settings.signs_bodies)
        try:
            session = call(connection, hello, settings.secret)
        except UsageError:
            connection.close()
            if member.mark != make_mark(settings.secret):
                raise
            reception.refuse("unauthenticated")  # it died, and somebody else has its port
            continue
        if session is None:
            connection.close()
        else:
            switchboard.add(connection, session)


def _invitation(member: Member | None) -> Invitation | None:
    return Invitation.parse(member.memory) if member is not None and member.memory else None
