"""A peer that speaks by hand: connections and handshakes of the real protocol, over sockets that block."""

import asyncio
import socket

from weft.distributed.mailbox.receiver import Receiver, Roster, ThreadMonitor
from weft.distributed.mailbox.sockets import AbstractDirectory, endpoints, handshake
from weft.distributed.mailbox.sockets.handshake import Hello, Session

SECRET = bytes(range(32))
SECONDS = 5.0


def connect(directory: AbstractDirectory, number: int = 0) -> socket.socket:
    """A connection to an entry of the directory, before any handshake."""
    member = directory.read(number)
    assert member is not None
    connection = asyncio.run(endpoints.connect(member.endpoint))
    connection.settimeout(SECONDS)
    return connection


def shake_hands(connection: socket.socket, hello: Hello) -> Session | None:
    """The caller's side, with the right secret; None where the other side hung up."""
    connection.setblocking(False)
    session = asyncio.run(handshake.start_handshake(connection, hello, SECRET, SECONDS))
    connection.settimeout(SECONDS)
    return session


def make_receiver(address: int, incarnation: int) -> Receiver:
    return Receiver(address, incarnation, monitor=ThreadMonitor(), roster=Roster())
