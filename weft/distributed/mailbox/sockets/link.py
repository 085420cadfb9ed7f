"""One connection to one life of one peer: frames out, frames in. Nothing here blocks.

callers' threads:   start(...) ---> outbox ---> sendmsg straight from tensor memory, by the caller or the loop
the loop's thread:  recv_into straight into tensor memory ---> frames ---> reception
"""

import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.landing import Landing
from weft.distributed.mailbox.lost import LostWork
from weft.distributed.mailbox.mailbox import Message
from weft.distributed.mailbox.payload import as_row
from weft.distributed.mailbox.reception import Reception, explain_gone
from weft.distributed.mailbox.sockets.frames import (
    BODY_MAC_BYTES,
    HEAD_BYTES,
    Head,
    Kind,
    Meta,
    RefusedError,
    check_head,
    digest_body,
    pack_head,
    pack_meta,
    sign_body,
    unpack_head,
    unpack_meta,
)
from weft.distributed.mailbox.sockets.handshake import Keys
from weft.distributed.mailbox.sockets.memory import Loan, SharedBodies
from weft.distributed.mailbox.sockets.work import SendWork
from weft.errors import UsageError

__all__ = ["Buffer", "Link", "LinkEndedError", "Session"]

MAX_VIEWS = 64  # handed to the kernel at once
TURN_BYTES = 2**23  # read from one peer before the others have their turn


class LinkEndedError(Exception):
    """The connection is over; the text says why."""


@dataclass(frozen=True, slots=True)
class Session:
    """What the handshake agreed on."""

    peer: int
    incarnation: int
    keys: Keys
    signs_bodies: bool
    num_read: int = 0  # frames that have come already


@final
class Buffer:
    """A given number of bytes to be read."""

    def __init__(self, num_bytes: int) -> None:
        self._data = bytearray(num_bytes)
        self._rest = memoryview(self._data)

    @property
    def is_full(self) -> bool:
        return not self._rest.nbytes

    @property
    def is_untouched(self) -> bool:
        return self._rest.nbytes == len(self._data)

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    def receive(self, connection: socket.socket) -> int:
        count = connection.recv_into(self._rest)
        self._rest = self._rest[count:]
        return count


@dataclass(slots=True)
class _Outgoing:
    views: list[memoryview]
    work: SendWork | None = None


@dataclass(slots=True)
class _Side:
    """What one direction counts."""

    sequence: int = 0
    moment: float = field(default_factory=time.monotonic)  # of the last bytes


@final
class Link:
    """An authenticated connection. `wake` is called, from any thread, when the loop must look at this link again."""

    def __init__(
        self,
        connection: socket.socket,
        session: Session,
        reception: Reception,
        *,
        max_bytes: int,
        bodies: SharedBodies | None,
        wake: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.session = session
        self.reason: str | None = None  # why it is over
        self._signs = session.signs_bodies
        self._reception = reception
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._wake = wake
        self._lock = threading.Lock()  # over what goes out
        self._outbox: deque[_Outgoing] = deque()
        self._out, self._in = _Side(), _Side(sequence=session.num_read)
        self._landing: Landing | None = None
        self._head = Buffer(HEAD_BYTES)
        self._frames = self._read_frames()
        self._want: Buffer | Landing = next(self._frames)

    # Out, from any thread.

    def send_message(self, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        work = SendWork(tensors)
        loan = self._bodies.lend(self.session.incarnation, tensors, work) if self._bodies is not None else None
        try:
            meta = pack_meta(tag, header, tensors, None if loan is None else (loan.number, loan.place))
        except UsageError:
            self._take_back_loan(loan)
            raise
        views = [as_row(tensor) for tensor in tensors if tensor.numel()] if loan is None else []
        ends_when_written = loan is None or not loan.is_in_place
        if not self.send(Kind.MESSAGE, meta, views, work if ends_when_written else None):
            self._take_back_loan(loan)
            return LostWork(explain_gone(self.session.peer, self.reason))
        return work

    def _take_back_loan(self, loan: Loan | None) -> None:
        """Of a frame that was not sent."""
        if self._bodies is not None and loan is not None:
            self._bodies.take_back(self.session.incarnation, loan.number)

    def send(
        self, kind: Kind, meta: bytes = b"", views: Sequence[memoryview] = (), work: SendWork | None = None
    ) -> bool:
        """Queue a frame, and write what the kernel takes at once; False where the link is over."""
        digest = digest_body(views) if views and self._signs else None
        with self._lock:
            if self.reason is not None:
                return False
            self._queue(kind, meta, views, digest, work)
            self._write()
            is_waiting = bool(self._outbox)
        if is_waiting:
            self._wake()
        return True

    def prepare_welcome(self) -> None:
        """Queue the first frame, to be written before all others, with them or when the loop flushes."""
        self._queue(Kind.WELCOME)

    def _queue(
        self,
        kind: Kind,
        meta: bytes = b"",
        views: Sequence[memoryview] = (),
        digest: bytes | None = None,
        work: SendWork | None = None,
    ) -> None:
        key = self.session.keys.send
        head = pack_head(key, kind, self._out.sequence, meta, sum(view.nbytes for view in views))
        self._out.sequence += 1
        tail = [memoryview(sign_body(key, head, digest))] if digest is not None else []
        self._outbox.append(_Outgoing([memoryview(head + meta), *views, *tail], work))

    def flush(self) -> bool:
        """Write what the kernel takes; whether anything is left."""
        with self._lock:
            self._write()
            return bool(self._outbox)

    def _write(self) -> None:
        while self._outbox:
            outgoing = self._outbox[0]
            try:
                count = self.connection.sendmsg(outgoing.views[:MAX_VIEWS])
            except BlockingIOError:
                return
            except OSError:  # the loop finds out why, and ends the works
                return
            self._out.moment = time.monotonic()
            _advance(outgoing.views, count)
            if not outgoing.views:
                self._outbox.popleft()
                if outgoing.work is not None:
                    outgoing.work.end()

    @property
    def last_sent(self) -> float:
        return self._out.moment

    # In, from the loop's thread.

    @property
    def last_heard(self) -> float:
        return self._in.moment

    def forgive(self, now: float) -> None:
        """Count the peer's silence from now."""
        self._in.moment = now

    def read(self) -> None:
        """Take what has come, up to one turn. Raises LinkEndedError or RefusedError."""
        num_bytes = 0
        while num_bytes < TURN_BYTES:
            try:
                count = self._want.receive(self.connection)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self._end_of_stream()
            num_bytes += count
            self._in.moment = time.monotonic()
            while self._want.is_full:
                self._want = next(self._frames)

    def _end_of_stream(self) -> None:
        is_between_frames = self._want is self._head and self._head.is_untouched
        if not is_between_frames:
            self._reception.refuse("truncated")
        raise LinkEndedError("it died")

    def _read_frames(self) -> Iterator[Buffer | Landing]:
        """The protocol: yields what must be filled next, and goes on when it is."""
        while True:
            raw = self._head = Buffer(HEAD_BYTES)
            yield raw
            head = unpack_head(raw.data, self._in.sequence, self._max_bytes)
            meta = Buffer(head.meta_bytes)
            yield meta
            check_head(self.session.keys.receive, raw.data, meta.data)
            self._in.sequence += 1
            match head.kind:
                case Kind.MESSAGE:
                    yield from self._read_message(head, raw.data, unpack_meta(meta.data))
                case Kind.GOODBYE:
                    raise LinkEndedError("it left")
                case Kind.RELEASE:
                    self._take_back(meta.data)
                case _:
                    pass

    def _read_message(self, head: Head, raw_head: bytes, meta: Meta) -> Iterator[Buffer | Landing]:
        if head.body_bytes != (meta.num_bytes if meta.loan is None else 0):
            raise RefusedError("malformed")
        if meta.num_bytes > self._max_bytes:
            raise RefusedError("oversized")
        session = self.session
        self._landing = landing = self._reception.begin(session.peer, meta.tag, meta.specs)
        if meta.loan is not None:
            self._read_loan(landing, *meta.loan, meta.num_bytes)
        else:
            yield landing
            if self._signs and head.body_bytes:
                mac = Buffer(BODY_MAC_BYTES)
                yield mac
                expected = sign_body(session.keys.receive, raw_head, landing.digest(digest_body))
                if not hmac.compare_digest(mac.data, expected):
                    raise RefusedError("forged")
        self._landing = None
        self._reception.end(landing, Message(session.peer, meta.tag, meta.header, (), session.incarnation))

    def _read_loan(self, landing: Landing, number: int, place: int, num_bytes: int) -> None:
        if self._bodies is None:
            raise RefusedError("malformed")
        landing.copy(self._bodies.borrow(self.session.incarnation, place, num_bytes))
        if self._bodies.is_given_up(self.session.incarnation, self._reception.incarnation):
            raise LinkEndedError("it has given this peer up")
        self.send(Kind.RELEASE, str(number).encode())

    def _take_back(self, meta: bytes) -> None:
        if self._bodies is None or not meta.isdigit():
            raise RefusedError("malformed")
        self._bodies.take_back(self.session.incarnation, int(meta))

    # The end.

    def close(self, reason: str, *, is_last: bool = False) -> None:
        """Give up what is under way, in and out; at the very last, the peer may still read what it was lent."""
        error = explain_gone(self.session.peer, reason)
        with self._lock:
            self.reason = reason
            outgoing, self._outbox = self._outbox, deque()
        for item in outgoing:
            if item.work is not None:
                item.work.end(error)
        if self._landing is not None:
            self._reception.give_up(self._landing)
        if self._bodies is not None:
            self._bodies.forget(self.session.incarnation, error, is_last=is_last)
        self.connection.close()


def _advance(views: list[memoryview], count: int) -> None:
    """Leave out the first bytes."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
