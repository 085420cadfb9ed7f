"""The thread behind a mailbox: takes calls, reads and writes all connections, notices who has gone silent."""

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from weft.distributed.mailbox.reception import Reception
from weft.distributed.mailbox.sockets.calling import prepare
from weft.distributed.mailbox.sockets.frames import Kind, RefusedError
from weft.distributed.mailbox.sockets.handshake import (
    HELLO_BYTES,
    PROOF_BYTES,
    check_proof,
    make_challenge,
    session_keys,
    unpack_hello,
)
from weft.distributed.mailbox.sockets.link import Buffer, Link, LinkEndedError, Session
from weft.distributed.mailbox.sockets.memory import SharedBodies

__all__ = ["Settings", "Switchboard"]

HANDSHAKE_SECONDS = 5.0
LINGER_SECONDS = 2.0  # for the last words of a mailbox that closes, and of a peer that has come back
SHORT_NAP, LONG_NAP = 0.05, 1.0  # seconds between looks at the clock
MAX_STRANGERS = 256  # who have not yet proved who they are
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # a call waits, and cannot be taken now
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


@dataclass(frozen=True, slots=True)
class Settings:
    """`known` are the addresses that peers may have, None for any; the timeout is in seconds."""

    secret: bytes
    timeout: float
    max_bytes: int
    signs_bodies: bool
    known: Collection[int] | None = None


@dataclass(slots=True)
class _Stranger:
    """Somebody who called and has not yet proved who it is."""

    connection: socket.socket
    deadline: float
    steps: Iterator[Buffer]
    want: Buffer


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A link of a call that another thread has made; `is_done` when the loop has taken it."""

    link: Link
    is_done: threading.Event


@final
class Switchboard:
    """Owns the listening socket and every link. Only its thread reads, joins and drops; any thread may send."""

    def __init__(
        self, listener: socket.socket, reception: Reception, settings: Settings, bodies: SharedBodies | None
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._reception = reception
        self._settings = settings
        self._bodies = bodies
        self._links: dict[int, Link] = {}
        self._heirs: dict[int, tuple[Link, float]] = {}  # later lives that wait for the end of the earlier one
        self._latest: dict[int, int] = {}  # incarnation of each peer
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # over what other threads touch: the bell, who waits, when to close
        self._waiting: set[Link] = set()  # links whose outbox the kernel did not take
        self._arrivals: list[_Arrival] = []
        self._closes_at: float | None = None
        self._is_leaving = False  # goodbye has been said, and no more calls are taken
        self._listens_at: float | None = None  # when to take calls again, after there were no descriptors for them
        self._looked_at = time.monotonic()
        self._selector.register(listener, READ, self._take_call)
        self._selector.register(self._bell, READ, self._answer_bell)
        self._thread = threading.Thread(target=self._run, name=f"weft-mailbox-{reception.address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def find(self, peer: int) -> Link | None:
        return self._links.get(peer)

    def add(self, connection: socket.socket, session: Session) -> None:
        """A connection that this side has opened, from any thread; returns when the loop has taken it, or will not."""
        link = self._make_link(connection, session)
        if link is None:
            connection.close()
            return
        arrival = _Arrival(link, threading.Event())
        with self._lock:
            is_running = self._bell >= 0
            if is_running:
                self._arrivals.append(arrival)
        if not is_running:
            link.close("this mailbox has closed")
            return
        self._ring()
        arrival.is_done.wait()

    def close(self) -> None:
        """Say goodbye to all, give their last words a little time, and end the thread."""
        with self._lock:
            self._closes_at = time.monotonic() + LINGER_SECONDS
        self._ring()
        self._thread.join()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over():
                for key, events in self._selector.select(self._nap()):
                    # Not dropped by an earlier event, its number perhaps already another connection's.
                    if self._selector.get_map().get(key.fd) is key:
                        handle: Callable[[int], None] = key.data
                        handle(events)
                self._tend(time.monotonic())
        except BaseException as error:  # nobody is above to see it: those who wait are told
            self._reception.fail(error)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        with self._lock:  # the bell's number may be another file's from here on
            bell, self._bell = self._bell, -1
            os.close(bell)
            arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.is_done.set()
        links = [*self._links.values(), *(heir for heir, _ in self._heirs.values())]
        for link in [*links, *(arrival.link for arrival in arrivals)]:
            link.close("this mailbox has closed", is_last=True)
        for connection in self._strangers:
            connection.close()
        self._listener.close()
        self._selector.close()

    def _nap(self) -> float:
        is_busy = self._closes_at is not None or self._strangers or self._heirs or self._listens_at is not None
        return min(SHORT_NAP if is_busy else LONG_NAP, self._settings.timeout / 8)

    def _is_over(self) -> bool:
        with self._lock:
            closes_at = self._closes_at
        if closes_at is None:
            return False
        last_sent = max((link.last_sent for link in self._links.values()), default=-LINGER_SECONDS)
        return not self._links or time.monotonic() > max(closes_at, last_sent + LINGER_SECONDS)

    def _ring(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _answer_bell(self, _events: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        with self._lock:
            waiting, self._waiting = self._waiting, set()
            arrivals, self._arrivals = self._arrivals, []
            closes = self._closes_at is not None
        for arrival in arrivals:
            self._take_in(arrival.link, is_welcome=not closes)
            arrival.is_done.set()
        for link in waiting:
            if self._links.get(link.session.peer) is link:
                self._selector.modify(link.connection, READ | WRITE, self._handler(link))
        if closes and not self._is_leaving:
            self._is_leaving = True
            self._stop_listening()
            for link in list(self._links.values()):
                link.send(Kind.GOODBYE)

    # Links.

    def _make_link(self, connection: socket.socket, session: Session) -> Link | None:
        """None where the peer has ended since the call."""
        if self._bodies is not None and not self._bodies.meet(session.incarnation):
            return None

        def wake() -> None:
            with self._lock:
                self._waiting.add(link)
            self._ring()

        link = Link(
            connection,
            session,
            self._reception,
            max_bytes=self._settings.max_bytes,
            bodies=self._bodies,
            wake=wake,
        )
        return link

    def _connect(self, link: Link) -> None:
        self._selector.register(link.connection, READ, self._handler(link))  # first, because it may fail
        self._links[link.session.peer] = link
        self._latest[link.session.peer] = link.session.incarnation
        self._reception.join(link.session.peer, link.session.incarnation)

    def _take_in(self, link: Link, *, is_welcome: bool) -> None:
        """A link of a call that was answered."""
        if not is_welcome or link.session.incarnation <= self._latest.get(link.session.peer, -1):
            link.close("it was replaced")  # a later life has called meanwhile
            return
        self._try_connect(link)

    def _try_connect(self, link: Link) -> bool:
        try:
            self._connect(link)
        except OSError:  # the kernel watches no more connections
            self._reception.refuse("failed")
            link.close("it could not be taken")
            return False
        return True

    def _handler(self, link: Link) -> Callable[[int], None]:
        return lambda events: self._serve(link, events)

    def _serve(self, link: Link, events: int) -> None:
        try:
            if events & WRITE and not link.flush():
                self._selector.modify(link.connection, READ, self._handler(link))
            if events & READ:
                link.read()
        except LinkEndedError as error:
            self._drop(link, str(error))
        except RefusedError as error:
            self._reception.refuse(str(error))
            self._drop(link, f"what it sent was refused: {error}")
        except Exception as error:  # such as no memory for a body: the others are not to blame
            self._reception.refuse("failed")
            self._drop(link, f"what it sent could not be taken: {type(error).__name__}: {error}")

    def _drop(self, link: Link, reason: str) -> None:
        peer = link.session.peer
        self._selector.unregister(link.connection)
        del self._links[peer]
        link.close(reason)
        self._reception.leave(peer, link.session.incarnation, reason)
        heir, _ = self._heirs.pop(peer, (None, 0.0))
        if heir is not None:
            self._welcome(heir)

    def _welcome(self, link: Link) -> None:
        """The peer hears of it when everyone here may know: whoever sends to it now, sends the welcome before."""
        link.prepare_welcome()
        if self._try_connect(link):
            link.flush()

    def _tend(self, now: float) -> None:
        """Signs of life out, and silence noticed. If it was this process that slept, nobody is blamed for it."""
        if now - self._looked_at < min(SHORT_NAP, self._settings.timeout / 8):
            return
        timeout = self._settings.timeout
        has_slept, self._looked_at = now - self._looked_at > timeout / 2, now
        for link in list(self._links.values()):
            if has_slept:
                link.forgive(now)
            if now - link.last_heard > timeout:
                self._drop(link, f"silent for {timeout:g} s")
            elif now - link.last_sent > timeout / 4:
                link.send(Kind.PING)
        for peer, (_, deadline) in list(self._heirs.items()):
            if now > deadline:
                self._drop(self._links[peer], "it was replaced")
        for stranger in list(self._strangers.values()):
            if now > stranger.deadline:
                self._send_away(stranger, "unauthenticated")
        if self._listens_at is not None and now > self._listens_at and not self._is_leaving:
            self._listens_at = None
            self._selector.register(self._listener, READ, self._take_call)

    def _stop_listening(self) -> None:
        if self._listener.fileno() in self._selector.get_map():
            self._selector.unregister(self._listener)

    # Strangers.

    def _take_call(self, _events: int) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # it would be called again and again, at once
                self._stop_listening()
                self._listens_at = time.monotonic() + SHORT_NAP
            return  # else it has hung up already
        if len(self._strangers) >= MAX_STRANGERS:
            self._reception.refuse("crowded")
            connection.close()
            return
        try:
            self._begin(connection)
        except OSError:  # it has hung up already, or the kernel watches no more connections
            self._reception.refuse("failed")
            connection.close()

    def _begin(self, connection: socket.socket) -> None:
        prepare(connection)
        connection.setblocking(False)
        steps = self._greet(connection)
        stranger = _Stranger(connection, time.monotonic() + HANDSHAKE_SECONDS, steps, next(steps))
        self._selector.register(connection, READ, lambda _events: self._hear(stranger))
        self._strangers[connection] = stranger

    def _hear(self, stranger: _Stranger) -> None:
        try:
            session = _follow(stranger)
        except RefusedError as error:
            self._send_away(stranger, str(error))
        except OSError:
            self._send_away(stranger, "unauthenticated")
        else:
            if session is not None:
                self._admit(stranger, session)

    def _greet(self, connection: socket.socket) -> Generator[Buffer, None, Session]:
        """The called side of the handshake; returns the session."""
        hello_bytes = Buffer(HELLO_BYTES)
        yield hello_bytes
        hello = unpack_hello(hello_bytes.data)
        challenge = make_challenge(self._settings.secret, hello_bytes.data)
        connection.send(challenge)
        proof = Buffer(PROOF_BYTES)
        yield proof
        if not check_proof(self._settings.secret, hello_bytes.data, challenge, proof.data):
            raise RefusedError("unauthenticated")
        known = self._settings.known
        if hello.address == self._reception.address or (known is not None and hello.address not in known):
            raise RefusedError("unknown peer")
        if (hello.to, hello.to_incarnation) != (self._reception.address, self._reception.incarnation):
            raise RefusedError("misdirected")
        if self._settings.signs_bodies and not hello.signs_bodies:
            raise RefusedError("unsigned")
        if hello.incarnation <= self._latest.get(hello.address, -1):
            raise RefusedError("late")
        keys = session_keys(self._settings.secret, hello_bytes.data, challenge, is_caller=False)
        return Session(hello.address, hello.incarnation, keys, hello.signs_bodies)

    def _admit(self, stranger: _Stranger, session: Session) -> None:
        try:
            link = self._make_link(stranger.connection, session)
        except Exception:  # no descriptors, no memory, a folder that is gone: only this one cannot be taken
            self._send_away(stranger, "failed")
            return
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        if link is None:
            stranger.connection.close()  # it has ended since it called
            return
        self._latest[session.peer] = session.incarnation
        if session.peer not in self._links:
            self._welcome(link)
            return
        former, _ = self._heirs.pop(session.peer, (None, 0.0))
        if former is not None:
            former.close("it was replaced")
        self._heirs[session.peer] = (link, time.monotonic() + LINGER_SECONDS)

    def _send_away(self, stranger: _Stranger, reason: str) -> None:
        self._reception.refuse(reason)
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
        stranger.connection.close()


def _follow(stranger: _Stranger) -> Session | None:
    """Read what a stranger says; the session when it has proved who it is, None while there is more to come."""
    try:
        while True:
            if stranger.want.receive(stranger.connection) == 0:
                raise RefusedError("unauthenticated")
            if stranger.want.is_full:
                stranger.want = next(stranger.steps)
    except BlockingIOError:
        return None
    except StopIteration as stop:
        session: Session = stop.value
        return session
