"""The engine in Python, for machines without a compiler: the same calls, the same order of sums, the same bits.

A call is a generator that yields the rank it waits for. Calls advance only while somebody waits for one or asks whether
it is done: there is no thread behind them.
"""

import mmap
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from weft.distributed.group.shared_memory import request as codes
from weft.distributed.group.shared_memory.engine import AbstractEngine, Outcome, Reason, Seat, Timing
from weft.distributed.group.shared_memory.request import Request
from weft.distributed.group.shared_memory.segment import ROLL_BYTES
from weft.distributed.group.shared_memory.torch_reduce import reduce_in_order, reduce_weighted

__all__ = ["PythonEngine", "arena_offset", "segment_bytes"]

STAGE_BYTES = 2**20
PACKET_BYTES = 2**17
PACKET_HEAD = 64  # tag, bytes of the message
SHORT_SLEEP, LONG_SLEEP = 20e-6, 1e-3  # seconds
LOOK_SECONDS = 0.005
GAP_SECONDS = 1.0  # between two rounds of waiting: this rank was frozen, and its peers maybe too


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets: counters, staging of each rank, one packet per pair of ranks, arenas."""

    size: int

    @property
    def num_counters(self) -> int:
        return 1 + 5 * self.size + 2 * self.size**2

    @property
    def stages(self) -> int:
        return ROLL_BYTES + -(-self.num_counters * 8 // 4096) * 4096

    @property
    def packets(self) -> int:
        return self.stages + self.size * 2 * STAGE_BYTES

    @property
    def arenas(self) -> int:
        return self.packets + self.size**2 * (PACKET_HEAD + PACKET_BYTES)


def segment_bytes(size: int, arena_bytes: int) -> int:
    return _Layout(size).arenas + size * arena_bytes


def arena_offset(size: int, arena_bytes: int, rank: int) -> int:
    return _Layout(size).arenas + rank * arena_bytes


@dataclass(slots=True, eq=False)
class _Open:
    """A call under way, told from others by its identity."""

    request: Request
    queued: int
    steps: Iterator[int]
    begun: int = 0
    ended: int = 0
    waited: int = 0
    waits_for: int | None = None
    outcome: Outcome | None = None


@dataclass(slots=True)
class _Inbox:
    """Messages of one peer that came before their recv; `is_busy` while one is being read."""

    aside: list[tuple[int, Tensor]] = field(default_factory=list)
    is_busy: bool = False


class _MismatchError(Exception):
    """Ranks started unlike calls; holds the other rank."""


@final
class PythonEngine(AbstractEngine):
    """One rank's engine over `memory`."""

    def __init__(self, memory: mmap.mmap, seat: Seat) -> None:
        rank, size = seat.rank, seat.size
        layout = _Layout(size)
        counters = np.frombuffer(memory, np.int64, layout.num_counters, ROLL_BYTES)
        self._failure = counters[:1]
        self._posted, self._taken, self._left, *self._signatures = counters[1 : 1 + 5 * size].reshape(5, size)
        self._sent, self._received = counters[1 + 5 * size :].reshape(2, size, size)
        data = torch.from_numpy(np.frombuffer(memory, np.uint8, layout.arenas - layout.stages, layout.stages))
        stages, packets = data.split([size * 2 * STAGE_BYTES, layout.arenas - layout.packets])
        self._stages = stages.view(size, 2, STAGE_BYTES)
        self._packets = packets.view(size, size, PACKET_HEAD + PACKET_BYTES)
        self._rank, self._size, self._pidfds, self._timeout = rank, size, seat.pidfds, seat.timeout
        self._round = 0
        self._inboxes = [_Inbox() for _ in range(size)]
        self._collectives: list[_Open] = []
        self._messages: list[_Open] = []
        self._calls: dict[int, _Open] = {}
        self._next = 1
        self._lock = threading.RLock()
        self._is_closed = False

    def start(self, request: Request) -> int:
        with self._lock:
            call = _Open(request, time.monotonic_ns(), self._run(request))
            is_message = request.kind in (codes.SEND, codes.RECV)
            (self._messages if is_message else self._collectives).append(call)
            handle, self._next = self._next, self._next + 1
            self._calls[handle] = call
            if self._is_closed:
                self._abandon(Outcome(Reason.CLOSED, self._rank))
            return handle

    def run(self, request: Request) -> Outcome | None:
        handle = self.start(request)
        outcome = self.wait(handle)
        self.forget(handle)
        return outcome

    def wait(self, handle: int) -> Outcome | None:
        call, begin = self._calls[handle], time.monotonic_ns()
        last_move = last_look = now = time.monotonic()
        nap = SHORT_SLEEP
        while not call.ended:
            before, now = now, time.monotonic()
            if now - before > GAP_SECONDS:  # a rank that did not run cannot tell how long its peers were silent
                last_move += now - before
            if self._advance():
                last_move, nap = now, SHORT_SLEEP
                continue
            if now - last_look > LOOK_SECONDS:
                last_look = now
                self._look_at_peers(is_late=now - last_move > self._timeout)
            time.sleep(nap)
            nap = min(2 * nap, LONG_SLEEP)
        call.waited += time.monotonic_ns() - begin
        return call.outcome

    def is_done(self, handle: int) -> bool:
        call = self._calls[handle]
        if not call.ended:
            self._advance()
        return call.ended != 0

    def timing(self, handle: int) -> Timing:
        call = self._calls[handle]
        return Timing(call.queued, call.begun, call.ended, call.waited)

    def forget(self, handle: int) -> None:
        self._calls.pop(handle, None)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._abandon(Outcome(Reason.CLOSED, self._rank))
                self._set(self._left, self._rank, 1)

    # --- driving

    def _advance(self) -> bool:
        """Advance all calls once; whether one of them ended or moved."""
        with self._lock:
            if self._failure[0]:
                self._abandon(Outcome(Reason(int(self._failure[0]) >> 32), int(self._failure[0]) & 0xFFFFFFFF))
                return True
            before = self._count_steps()
            for call in [*self._collectives[:1], *self._movable_messages()]:
                self._step(call)
            return self._count_steps() != before

    def _movable_messages(self) -> list[_Open]:
        """All that are to come, and of those to one rank the first: the packets of two must not mix."""
        first_sends: dict[int, _Open] = {}
        for call in self._messages:
            if call.request.kind == codes.SEND:
                first_sends.setdefault(call.request.root, call)
        return [c for c in self._messages if c.request.kind == codes.RECV or first_sends[c.request.root] is c]

    def _count_steps(self) -> int:
        own = self._posted[self._rank] + self._taken[self._rank]
        messages = self._sent[self._rank].sum() + self._received[:, self._rank].sum()
        return int(own + messages) - len(self._collectives) - len(self._messages)

    def _step(self, call: _Open) -> None:
        call.begun = call.begun or time.monotonic_ns()
        try:
            call.waits_for = next(call.steps)
        except StopIteration:
            self._end(call, None)
        except _MismatchError as mismatch:
            if call in self._collectives:
                self._fail(Reason.MISMATCH, mismatch.args[0])
            self._end(call, Outcome(Reason.MISMATCH, mismatch.args[0]))
        except BaseException:  # such as Ctrl-C: the call stands half way, and this rank cannot go on
            self._fail(Reason.DIED, self._rank)
            self._end(call, Outcome(Reason.DIED, self._rank))
            raise

    def _end(self, call: _Open, outcome: Outcome | None) -> None:
        (self._collectives if call in self._collectives else self._messages).remove(call)
        call.outcome = outcome
        call.ended = time.monotonic_ns()

    def _abandon(self, outcome: Outcome) -> None:
        for call in [*self._collectives, *self._messages]:
            self._end(call, outcome)

    def _look_at_peers(self, is_late: bool) -> None:
        with self._lock:
            waited_for = [call.waits_for for call in [*self._collectives[:1], *self._messages]]
            poll = select.poll()
            for descriptor in self._pidfds:
                poll.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(0)}
            has_left = [bool(left) for left in self._left]
            if self._advance():  # the last steps of a peer may have come just before its end
                return
            for peer in waited_for:
                if peer is None or peer == self._rank:
                    continue
                if has_left[peer] or self._pidfds[peer] in ended:
                    self._fail(Reason.LEFT if has_left[peer] else Reason.DIED, peer)
                elif is_late:
                    self._fail(Reason.SILENT, peer)

    def _fail(self, reason: Reason, peer: int) -> None:
        if not self._failure[0]:
            self._failure[0] = reason << 32 | peer

    # --- counters

    def _set(self, counters: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", index: int, value: int) -> None:
        """Publish what was written before: taking a lock is a barrier for the processor."""
        with self._lock:
            counters[index] = value

    def _reaches(self, counters: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", index: int, value: int) -> bool:
        with self._lock:
            return bool(counters[index] >= value)

    # --- calls

    def _run(self, request: Request) -> Iterator[int]:
        if request.kind == codes.SEND:
            return self._send(request)
        if request.kind == codes.RECV:
            return self._receive(request)
        return self._rounds(request)

    def _rounds(self, request: Request) -> Iterator[int]:
        """In each round post a chunk, then take what is needed; see collectives.h, of which this is the plain form."""
        is_parted = request.kind in (codes.REDUCE_SCATTER, codes.ALL_TO_ALL, codes.SCATTER)
        room = STAGE_BYTES // (self._size if is_parted else 1) // 64 * 64
        num_bytes = request.length * request.width
        peers = [p for p in range(self._size) if p != self._rank]
        for begin in range(0, max(num_bytes, 1), room):
            chunk = _Chunk(begin, min(begin + room, num_bytes), self._round % 2, room)
            for peer in peers:
                while not self._reaches(self._taken, peer, self._round - 1):
                    yield peer
            self._put(request, chunk, is_parted)
            self._signatures[chunk.slot][self._rank] = _signature(request)
            self._set(self._posted, self._rank, self._round + 1)
            for peer in peers:
                while not self._reaches(self._posted, peer, self._round + 1):
                    yield peer
            for peer in peers:
                if self._signatures[chunk.slot][peer] != _signature(request):
                    raise _MismatchError(peer)
            self._take(request, chunk)
            self._round += 1
            self._set(self._taken, self._rank, self._round)

    def _put(self, request: Request, chunk: "_Chunk", is_parted: bool) -> None:
        if request.source is None or request.kind == codes.BARRIER:
            return
        data, num_parts = _bytes(request.source), self._size if is_parted else 1
        parts = data.view(num_parts, len(data) // num_parts)[:, chunk.begin : chunk.end]
        stage = self._stages[self._rank, chunk.slot, : num_parts * chunk.room].view(num_parts, chunk.room)
        stage[:, : parts.shape[1]] = parts

    def _take(self, request: Request, chunk: "_Chunk") -> None:
        length, is_root = chunk.end - chunk.begin, self._rank == request.root

        def staged(peer: int, part: int = 0) -> Tensor:
            begin = part * chunk.room
            data: Tensor = self._stages[peer, chunk.slot, begin : begin + length]
            return data

        def write(part: int, data: Tensor) -> None:
            assert request.target is not None
            at = part * request.length * request.width
            _bytes(request.target)[at + chunk.begin : at + chunk.end] = data

        ranks = range(self._size)
        own_part = self._rank if request.kind in (codes.REDUCE_SCATTER, codes.ALL_TO_ALL) else 0
        match request.kind:
            case codes.ALL_REDUCE | codes.REDUCE_SCATTER:
                write(0, reduce_in_order(request, [staged(p, own_part) for p in ranks]))
            case codes.REDUCE if is_root:
                write(0, reduce_in_order(request, [staged(p) for p in ranks]))
            case codes.ALL_GATHER | codes.ALL_TO_ALL:
                for peer in ranks:
                    write(peer, staged(peer, own_part))
            case codes.GATHER if is_root:
                for peer in ranks:
                    write(peer, staged(peer))
            case codes.BROADCAST if not is_root:
                write(0, staged(request.root))
            case codes.SCATTER:
                write(0, staged(request.root, self._rank))
            case codes.NEIGHBOUR_ALL_GATHER:
                for index, peer in enumerate(request.neighbours):
                    write(index, staged(peer))
            case codes.NEIGHBOUR_ALL_REDUCE:
                write(0, reduce_weighted(request, [staged(p) for p in (self._rank, *request.neighbours)]))

    # --- messages

    def _send(self, request: Request) -> Iterator[int]:
        assert request.source is not None
        data, to, me = _bytes(request.source), request.root, self._rank
        for begin in range(0, max(len(data), 1), PACKET_BYTES):
            while self._sent[me, to] != self._received[me, to]:
                yield to
            packet, part = self._packets[me, to], data[begin : begin + PACKET_BYTES]
            packet[:16].view(torch.int64).copy_(torch.tensor([request.tag, len(data)]))
            packet[PACKET_HEAD : PACKET_HEAD + len(part)] = part
            self._set(self._sent[me], to, int(self._sent[me, to]) + 1)

    def _receive(self, request: Request) -> Iterator[int]:
        assert request.target is not None
        inbox, source = self._inboxes[request.root], request.root
        while True:
            for index, (tag, message) in enumerate(inbox.aside):
                if tag == request.tag and self._is_first_recv(request):
                    del inbox.aside[index]
                    if len(message) != request.length:
                        raise _MismatchError(source)
                    _bytes(request.target)[:] = message
                    return
            if not inbox.is_busy:
                yield from self._read_message(inbox, source)
            yield source

    def _is_first_recv(self, request: Request) -> bool:
        """Of those from this peer with this tag. A later one may look while the first has not had its turn yet."""
        alike = (codes.RECV, request.root, request.tag)
        others = (call.request for call in self._messages)
        return next(o for o in others if (o.kind, o.root, o.tag) == alike) is request

    def _read_message(self, inbox: _Inbox, source: int) -> Iterator[int]:
        """Put the next message of a peer aside, from where the recv that started first takes it."""
        inbox.is_busy = True
        message, arrived, tag = torch.empty(0, dtype=torch.uint8), -1, 0
        while arrived < len(message):
            while not self._reaches(self._sent[source], self._rank, int(self._received[source, self._rank]) + 1):
                yield source
            packet = self._packets[source, self._rank]
            if arrived < 0:
                tag, total = packet[:16].view(torch.int64).tolist()
                message, arrived = torch.empty(total, dtype=torch.uint8), 0
            part = message[arrived : arrived + PACKET_BYTES]
            part.copy_(packet[PACKET_HEAD : PACKET_HEAD + len(part)])
            arrived += len(part)
            self._set(self._received[source], self._rank, int(self._received[source, self._rank]) + 1)
        inbox.aside.append((tag, message))
        inbox.is_busy = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes begin to end of each part, in staging buffer `slot`, where parts lie `room` bytes apart."""

    begin: int
    end: int
    slot: int
    room: int


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _signature(request: Request) -> int:
    return hash((request.kind, request.type, request.op, request.root, request.length))
