"""The table of a mailbox's connections, one for each peer: added, replaced, watched and dropped."""

import asyncio
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from weft.distributed.mailbox.receiver import Receiver
from weft.distributed.mailbox.sockets.connection import Connection, ConnectionEndedError
from weft.distributed.mailbox.sockets.frames import Kind, RefusedError
from weft.distributed.mailbox.sockets.handshake import Session
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies

__all__ = ["ConnectionSettings", "Connections"]

LINGER_SECONDS = 2.0  # for the last messages of a mailbox that closes, and of a peer that has come back
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """`known` are the addresses that peers may have, None for any; the timeout is in seconds."""

    secret: bytes
    timeout: float
    max_bytes: int
    signs_bodies: bool
    known: Collection[int] | None = None


@final
class Connections:
    """Only the loop's thread changes it; any thread may find a connection, and send over it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        receiver: Receiver,
        settings: ConnectionSettings,
        bodies: SharedBodies | None,
    ) -> None:
        self._loop = loop
        self.receiver = receiver
        self.settings = settings
        self._bodies = bodies
        self._by_peer: dict[int, Connection] = {}
        self._successors: dict[int, Connection] = {}  # later incarnations that wait for the end of the earlier one
        self._checked_at = time.monotonic()

    def find(self, peer: int) -> Connection | None:
        return self._by_peer.get(peer)

    def find_latest(self, peer: int) -> int:
        """The last incarnation of a peer that has been connected; -1 where there was none."""
        successor = self._successors.get(peer)
        return successor.session.incarnation if successor else self.receiver.roster.latest.get(peer, -1)

    def add(self, socket: socket.socket, session: Session) -> None:
        """Take a connection that this side has opened."""
        connection = self._make(socket, session)
        if connection is not None and session.incarnation > self.find_latest(session.peer):
            self._open(connection)
        elif connection is not None:
            connection.close("it was replaced")  # a later incarnation has called meanwhile

    def admit(self, socket: socket.socket, session: Session) -> None:
        """Take a connection that the peer has opened, when that of its earlier incarnation has ended."""
        connection = self._make(socket, session)
        if connection is None:
            return
        if session.peer not in self._by_peer:
            self._welcome(connection)
            return
        former = self._successors.pop(session.peer, None)
        if former is not None:
            former.close("it was replaced")
        self._successors[session.peer] = connection
        self._loop.call_later(LINGER_SECONDS, self._replace, connection)

    def _make(self, socket: socket.socket, session: Session) -> Connection | None:
        """None where the peer has ended since the handshake."""
        if self._bodies is not None and not self._bodies.attach(session.incarnation):
            socket.close()
            return None
        return Connection(
            socket,
            session,
            self.receiver,
            max_bytes=self.settings.max_bytes,
            bodies=self._bodies,
            on_blocked=self._flush_later,
        )

    def _welcome(self, connection: Connection) -> None:
        """The peer hears of it when everyone here may know: whoever sends to it now, sends the welcome before."""
        connection.queue_welcome()
        if self._open(connection):
            connection.flush()

    def _open(self, connection: Connection) -> bool:
        session = connection.session
        try:
            self._loop.add_reader(connection.socket, self._read, connection)
        except OSError:  # the kernel watches no more connections
            self.receiver.refuse("failed")
            connection.close("it could not be taken")
            return False
        self._by_peer[session.peer] = connection
        self.receiver.join(session.peer, session.incarnation)
        return True

    def _replace(self, successor: Connection) -> None:
        peer = successor.session.peer
        if self._successors.get(peer) is successor:
            self._drop(self._by_peer[peer], "it was replaced")

    def _read(self, connection: Connection) -> None:
        try:
            connection.read()
        except ConnectionEndedError as error:
            self._drop(connection, str(error))
        except RefusedError as error:
            self.receiver.refuse(str(error))
            self._drop(connection, f"what it sent was refused: {error}")
        except Exception as error:  # such as no memory for a body: the others are not to blame
            self.receiver.refuse("failed")
            self._drop(connection, f"what it sent could not be taken: {type(error).__name__}: {error}")

    def _flush_later(self, connection: Connection) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._start_flushing, connection)

    def _start_flushing(self, connection: Connection) -> None:
        if self._by_peer.get(connection.session.peer) is connection:
            self._loop.add_writer(connection.socket, self._flush, connection)

    def _flush(self, connection: Connection) -> None:
        if not connection.flush():
            self._loop.remove_writer(connection.socket)

    def _drop(self, connection: Connection, reason: str) -> None:
        session = connection.session
        self._loop.remove_reader(connection.socket)
        self._loop.remove_writer(connection.socket)
        del self._by_peer[session.peer]
        connection.close(reason)
        self.receiver.leave(session.peer, session.incarnation, reason)
        successor = self._successors.pop(session.peer, None)
        if successor is not None:
            self._welcome(successor)

    def check(self) -> None:
        """Send signs of life, and drop the silent. If it was this process that slept, nobody is blamed for it."""
        now, timeout = time.monotonic(), self.settings.timeout
        has_slept, self._checked_at = now - self._checked_at > timeout / 2, now
        for connection in list(self._by_peer.values()):
            if has_slept:
                connection.last_heard = now
            if now - connection.last_heard > timeout:
                self._drop(connection, f"silent for {timeout:g} s")
            elif now - connection.last_sent > timeout / 4:
                connection.send(Kind.PING)

    async def say_goodbye(self) -> None:
        """Tell all peers, and return when they have hung up, or have had time to read the last messages."""
        for connection in self._by_peer.values():
            connection.send(Kind.GOODBYE)
        began = time.monotonic()
        while self._by_peer:
            last_sent = max(connection.last_sent for connection in self._by_peer.values())
            if time.monotonic() > max(began, last_sent) + LINGER_SECONDS:
                return
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Close all; the loop has ended."""
        for connection in [*self._by_peer.values(), *self._successors.values()]:
            connection.close("this mailbox has closed", is_last=True)
