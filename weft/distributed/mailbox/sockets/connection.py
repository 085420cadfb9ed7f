"""One connection to one incarnation of one peer: frames out, frames in. Nothing here blocks.

callers' threads:   send_message(...) ---> queue ---> sendmsg straight from tensor memory, by the caller or the loop
the loop's thread:  recv_into straight into tensor memory ---> frames ---> receiver
"""

import hmac
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import final

from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.endpoint import SendWork, lost_send
from weft.distributed.mailbox.inbox import ReceiveBuffer
from weft.distributed.mailbox.mailbox import Message
from weft.distributed.mailbox.payload import view_bytes
from weft.distributed.mailbox.receiver import Receiver, lost_peer
from weft.distributed.mailbox.sockets import frames
from weft.distributed.mailbox.sockets.frames import HEAD_BYTES, Kind, RefusedError
from weft.distributed.mailbox.sockets.handshake import Session
from weft.distributed.mailbox.sockets.shared_bodies import SharedBodies
from weft.errors import PeerLostError

__all__ = ["Connection", "ConnectionEndedError"]

MAX_VIEWS = 64  # handed to the kernel at once
TURN_BYTES = 2**23  # read from one peer before the others have their turn


class ConnectionEndedError(Exception):
    """The connection is over; the text says why."""


@final
class _ByteBuffer:
    """A given number of bytes to be read."""

    def __init__(self, num_bytes: int) -> None:
        self._data = bytearray(num_bytes)
        self._rest = memoryview(self._data)

    @property
    def is_full(self) -> bool:
        return not self._rest.nbytes

    @property
    def is_empty(self) -> bool:
        return self._rest.nbytes == len(self._data)

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    def receive(self, connection: socket.socket) -> int:
        count = connection.recv_into(self._rest)
        self._rest = self._rest[count:]
        return count


@final
class _FrameWriter:
    """The outgoing side, for any thread. `on_blocked` is called when the kernel takes no more: the loop must help."""

    def __init__(self, connection: socket.socket, session: Session, on_blocked: Callable[[], None]) -> None:
        self.error: PeerLostError | None = None  # why it is over
        self.last_sent = time.monotonic()
        self._connection = connection
        self._key = session.send_key
        self._signs_bodies = session.signs_bodies
        self._on_blocked = on_blocked
        self._lock = threading.Lock()
        self._queue: deque[tuple[list[memoryview], SendWork | None]] = deque()
        self._sequence = 0

    def send(
        self, kind: Kind, meta: bytes = b"", views: Sequence[memoryview] = (), work: SendWork | None = None
    ) -> bool:
        """Queue a frame, and write what the kernel takes at once; False where the connection is over."""
        digest = frames.digest_body(views) if views and self._signs_bodies else None
        with self._lock:
            if self.error is not None:
                return False
            self._queue.append((self._pack(kind, meta, views, digest), work))
            self._write()
            is_blocked = bool(self._queue)
        if is_blocked:
            self._on_blocked()
        return True

    def queue_welcome(self) -> None:
        """Queue the first frame, to be written before all others, with them or when the loop flushes."""
        self._queue.append((self._pack(Kind.WELCOME, b"", (), None), None))

    def _pack(self, kind: Kind, meta: bytes, views: Sequence[memoryview], digest: bytes | None) -> list[memoryview]:
        head = frames.pack_head(self._key, kind, self._sequence, meta, sum(view.nbytes for view in views))
        self._sequence += 1
        tail = [memoryview(frames.sign_body(self._key, head, digest))] if digest is not None else []
        return [memoryview(head + meta), *views, *tail]

    def flush(self) -> bool:
        """Write what the kernel takes; whether anything is left."""
        with self._lock:
            self._write()
            return bool(self._queue)

    def _write(self) -> None:
        while self._queue:
            views, work = self._queue[0]
            try:
                count = self._connection.sendmsg(views[:MAX_VIEWS])
            except OSError:  # it would block; or has ended: the loop finds out why, and ends the works
                return
            self.last_sent = time.monotonic()
            _advance(views, count)
            if not views:
                self._queue.popleft()
                if work is not None:
                    work.end()

    def close(self, error: PeerLostError) -> None:
        """Take no more frames, and end the works of those that were not written."""
        with self._lock:
            self.error = error
            queue, self._queue = self._queue, deque()
        for _, work in queue:
            if work is not None:
                work.end(error)


@final
class Connection:
    """An authenticated connection. Only the loop's thread reads and closes; any thread may send.

    `on_blocked(connection)` is called, from any thread, when the loop must flush it.
    """

    def __init__(
        self,
        socket: socket.socket,
        session: Session,
        receiver: Receiver,
        *,
        max_bytes: int,
        bodies: SharedBodies | None,
        on_blocked: "Callable[[Connection], None]",
    ) -> None:
        socket.setblocking(False)
        self.socket = socket
        self.session = session
        self.last_heard = time.monotonic()
        self._receiver = receiver
        self._max_bytes = max_bytes
        self._bodies = bodies
        self._writer = _FrameWriter(socket, session, lambda: on_blocked(self))
        self.send, self.flush, self.queue_welcome = self._writer.send, self._writer.flush, self._writer.queue_welcome
        self._num_read = session.num_read
        self._message: ReceiveBuffer | None = None  # the one that is coming in
        self._head = _ByteBuffer(HEAD_BYTES)
        self._frames = self._read_frames()
        self._buffer: _ByteBuffer | ReceiveBuffer = next(self._frames)

    @property
    def last_sent(self) -> float:
        return self._writer.last_sent

    def send_message(self, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        work, incarnation = SendWork(tensors), self.session.incarnation
        block = self._bodies.share(incarnation, tensors, work) if self._bodies is not None else None
        views = [view_bytes(tensor) for tensor in tensors if tensor.numel()] if block is None else []
        ends_when_written = block is None or not block.is_in_place
        is_sent = False
        try:
            meta = frames.pack_meta(tag, header, tensors, None if block is None else (block.number, block.offset))
            is_sent = self.send(Kind.MESSAGE, meta, views, work if ends_when_written else None)
        finally:
            if self._bodies is not None and block is not None and not is_sent:
                self._bodies.release(incarnation, block.number)
        if is_sent:
            return work
        assert self._writer.error is not None, "only a connection that is over takes no frames"
        return lost_send(self._writer.error)

    def read(self) -> None:
        """Take what has come, up to one turn. Raises ConnectionEndedError or RefusedError."""
        num_bytes = 0
        while num_bytes < TURN_BYTES:
            try:
                count = self._buffer.receive(self.socket)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                if not (self._buffer is self._head and self._head.is_empty):
                    self._receiver.refuse("truncated")
                raise ConnectionEndedError("it died")
            num_bytes += count
            self.last_heard = time.monotonic()
            while self._buffer.is_full:
                self._buffer = next(self._frames)

    def _read_frames(self) -> Iterator[_ByteBuffer | ReceiveBuffer]:
        """The protocol: yields what must be filled next, and goes on when it is."""
        while True:
            raw = self._head = _ByteBuffer(HEAD_BYTES)
            yield raw
            head = frames.unpack_head(raw.data, self._num_read, self._max_bytes)
            meta = _ByteBuffer(head.meta_bytes)
            yield meta
            frames.check_head(self.session.receive_key, raw.data, meta.data)
            self._num_read += 1
            match head.kind:
                case Kind.MESSAGE:
                    yield from self._read_message(head, raw.data, frames.unpack_meta(meta.data))
                case Kind.GOODBYE:
                    raise ConnectionEndedError("it left")
                case Kind.RELEASE:
                    if self._bodies is None or not meta.data.isdigit():
                        raise RefusedError("malformed")
                    self._bodies.release(self.session.incarnation, int(meta.data))
                case _:
                    pass

    def _read_message(
        self, head: frames.Head, raw_head: bytes, meta: frames.Meta
    ) -> Iterator[_ByteBuffer | ReceiveBuffer]:
        if head.body_bytes != (meta.num_bytes if meta.block is None else 0):
            raise RefusedError("malformed")
        if meta.num_bytes > self._max_bytes:
            raise RefusedError("oversized")
        session = self.session
        self._message = buffer = self._receiver.begin_message(session.peer, meta.tag, meta.specs)
        if meta.block is not None:
            self._read_block(buffer, *meta.block, meta.num_bytes)
        else:
            yield buffer
            if session.signs_bodies and head.body_bytes:
                mac = _ByteBuffer(frames.BODY_MAC_BYTES)
                yield mac
                expected = frames.sign_body(session.receive_key, raw_head, buffer.digest(frames.digest_body))
                if not hmac.compare_digest(mac.data, expected):
                    raise RefusedError("forged")
        self._message = None
        self._receiver.end_message(buffer, Message(session.peer, meta.tag, meta.header, (), session.incarnation))

    def _read_block(self, buffer: ReceiveBuffer, number: int, offset: int, num_bytes: int) -> None:
        if self._bodies is None:
            raise RefusedError("malformed")
        buffer.copy(self._bodies.read(self.session.incarnation, offset, num_bytes))
        if self._bodies.is_revoked(self.session.incarnation, self._receiver.incarnation):
            raise ConnectionEndedError("it has given this peer up")
        self.send(Kind.RELEASE, str(number).encode())

    def close(self, reason: str, *, is_last: bool = False) -> None:
        """Give up what is under way, in and out; at the very last, the peer may still read what it can."""
        error = lost_peer(self.session.peer, reason)
        self._writer.close(error)
        if self._message is not None:
            self._receiver.abandon_message(self._message)
        if self._bodies is not None:
            self._bodies.detach(self.session.incarnation, error, is_last=is_last)
        self.socket.close()


def _advance(views: list[memoryview], count: int) -> None:
    """Leave out the first bytes."""
    done = 0
    while done < len(views) and count >= views[done].nbytes:
        count -= views[done].nbytes
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
