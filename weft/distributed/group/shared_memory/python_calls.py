"""Requests of the engine in Python, as generators that yield the rank they wait for."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.shared_memory import request as codes
from weft.distributed.group.shared_memory.python_memory import PACKET_BYTES, PACKET_HEAD, STAGE_BYTES, PythonMemory
from weft.distributed.group.shared_memory.request import Request
from weft.distributed.group.shared_memory.torch_reduce import reduce_in_order, reduce_weighted

__all__ = ["Collectives", "Messages", "MismatchError"]


class MismatchError(Exception):
    """Ranks started unlike calls; holds the other rank."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes begin to end of each part, as far as it has them, in staging buffer `slot`, where parts lie `room` bytes
    apart."""

    begin: int
    end: int
    slot: int
    room: int

    def of(self, length: int) -> slice:
        """The bytes that it holds of a part of so many."""
        return slice(min(self.begin, length), min(self.end, length))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Bytes of the parts that this rank stages, of those that it takes from each rank, and of the longest of all."""

    sends: tuple[int, ...]
    recvs: tuple[int, ...]
    longest: int


@final
class Collectives:
    """Collectives as rounds over the staging buffers; see collectives.h, of which this is the plain form."""

    def __init__(self, memory: PythonMemory) -> None:
        self._memory = memory
        self._round = 0

    def run(self, request: Request) -> Iterator[int]:
        """In each round post a chunk, then take what is needed of those of the others."""
        memory = self._memory
        cut = yield from self._cut(request)
        room = STAGE_BYTES // len(cut.sends) // 64 * 64
        peers = [peer for peer in range(memory.size) if peer != memory.rank]
        for begin in range(0, max(cut.longest, 1), room):
            chunk = _Chunk(begin, begin + room, self._round % 2, room)
            for peer in peers:
                while not memory.reaches(memory.taken, peer, self._round - 1):
                    yield peer
            self._put(request, chunk, cut)
            memory.signatures[chunk.slot][memory.rank] = _signature(request)
            memory.publish(memory.posted, memory.rank, self._round + 1)
            for peer in peers:
                while not memory.reaches(memory.posted, peer, self._round + 1):
                    yield peer
            for peer in peers:
                if memory.signatures[chunk.slot][peer] != _signature(request):
                    raise MismatchError(peer)
            self._take(request, chunk, cut)
            self._round += 1
            memory.publish(memory.taken, memory.rank, self._round)

    def _cut(self, request: Request) -> Generator[int, None, _Cut]:
        size, own = self._memory.size, request.length * request.width
        lengths = tuple(length * request.width for length in request.numbers)
        match request.kind:
            case codes.REDUCE_SCATTER if lengths:
                return _Cut(lengths, (own,) * size, max(lengths))
            case codes.ALL_GATHER if lengths:
                return _Cut((own,), lengths, max(lengths))
            case codes.ALL_TO_ALL if lengths:
                return (yield from self._cut_exchange(lengths[:size], lengths[size:]))
            case codes.REDUCE_SCATTER | codes.ALL_TO_ALL:
                return _Cut((own,) * size, (own,) * size, own)
            case _:
                return _Cut((own,), (own,) * size, own)

    def _cut_exchange(self, sends: tuple[int, ...], recvs: tuple[int, ...]) -> Generator[int, None, _Cut]:
        """A rank knows its own lengths alone: gather those of all, and see that they fit."""
        rows = torch.empty(self._memory.size, len(sends), dtype=torch.int64)
        row = torch.tensor(sends)
        yield from self.run(Request(codes.ALL_GATHER, row, rows, row.nbytes, root=-1))  # no plain gather has this root
        for peer, length in enumerate(recvs):
            if rows[peer, self._memory.rank] != length:
                raise MismatchError(peer)
        return _Cut(sends, recvs, int(rows.max()))

    def _put(self, request: Request, chunk: _Chunk, cut: _Cut) -> None:
        if request.source is None or request.kind == codes.BARRIER:
            return
        stage = self._memory.stages[self._memory.rank, chunk.slot]
        for index, part in enumerate(_bytes(request.source).split(cut.sends)):
            held, at = part[chunk.of(len(part))], index * chunk.room
            stage[at : at + len(held)] = held

    def _take(self, request: Request, chunk: _Chunk, cut: _Cut) -> None:
        rank, ranks, is_root = self._memory.rank, range(self._memory.size), self._memory.rank == request.root

        def staged(peer: int, part: int = 0) -> Tensor:
            held, at = chunk.of(cut.recvs[peer]), part * chunk.room
            data: Tensor = self._memory.stages[peer, chunk.slot, at : at + held.stop - held.start]
            return data

        def write(part: int, data: Tensor) -> None:
            assert request.target is not None
            at = sum(cut.recvs[:part])
            _bytes(request.target)[at : at + cut.recvs[part]][chunk.of(cut.recvs[part])] = data

        match request.kind:
            case codes.ALL_REDUCE:
                write(0, reduce_in_order(request, [staged(peer) for peer in ranks]))
            case codes.REDUCE_SCATTER:
                write(0, reduce_in_order(request, [staged(peer, rank) for peer in ranks]))
            case codes.REDUCE if is_root:
                write(0, reduce_in_order(request, [staged(peer) for peer in ranks]))
            case codes.ALL_GATHER:
                for peer in ranks:
                    write(peer, staged(peer))
            case codes.ALL_TO_ALL:
                for peer in ranks:
                    write(peer, staged(peer, rank))
            case codes.BROADCAST if not is_root:
                write(0, staged(request.root))
            case codes.NEIGHBOUR_ALL_REDUCE:
                write(0, reduce_weighted(request, [staged(peer) for peer in (rank, *request.numbers)]))


@dataclass(slots=True)
class _Arrivals:
    """Whole messages of one peer that came before their recv; `is_busy` while one is being read."""

    messages: list[tuple[int, Tensor]] = field(default_factory=list)
    is_busy: bool = False


@final
class Messages:
    """Messages between two ranks, packet by packet. Those of one peer with one tag reach its receives in order."""

    def __init__(self, memory: PythonMemory) -> None:
        self._memory = memory
        self._arrivals = [_Arrivals() for _ in range(memory.size)]
        self._receives: dict[int, Request] = {}  # by identity, in the order of their start

    def send(self, request: Request) -> Iterator[int]:
        assert request.source is not None
        memory, data, to = self._memory, _bytes(request.source), request.root
        sent, received = memory.sent[memory.rank], memory.received[memory.rank]
        packet = memory.packets[memory.rank, to]
        for begin in range(0, max(len(data), 1), PACKET_BYTES):
            while sent[to] != received[to]:
                yield to
            part = data[begin : begin + PACKET_BYTES]
            packet[:16].view(torch.int64).copy_(torch.tensor([request.tag, len(data)]))
            packet[PACKET_HEAD : PACKET_HEAD + len(part)] = part
            memory.publish(sent, to, int(sent[to]) + 1)

    def receive(self, request: Request) -> Generator[int, None, int]:
        self._receives[id(request)] = request
        return self._receive(request)

    def _receive(self, request: Request) -> Generator[int, None, int]:
        """Returns the rank that the message came from."""
        sources = range(self._memory.size) if request.root == codes.ANY else (request.root,)
        while True:
            for source in sources:
                if self._take_arrived(request, source):
                    return source
                if not self._arrivals[source].is_busy and (len(sources) == 1 or self._has_packet(source)):
                    yield from self._read_message(source)
            yield request.root

    def _take_arrived(self, request: Request, source: int) -> bool:
        assert request.target is not None
        messages = self._arrivals[source].messages
        for index, (tag, message) in enumerate(messages):
            if tag == request.tag and self._is_first(request, source):
                del messages[index], self._receives[id(request)]
                if len(message) != request.length:
                    raise MismatchError(source)
                _bytes(request.target)[:] = message
                return True
        return False

    def _is_first(self, request: Request, source: int) -> bool:
        """Of those for this peer with this tag. A later one may look while the first has not had its turn yet."""
        alike = (other for other in self._receives.values() if other.tag == request.tag)
        return next(other for other in alike if other.root in (source, codes.ANY)) is request

    def _has_packet(self, source: int) -> bool:
        memory, me = self._memory, self._memory.rank
        return memory.reaches(memory.sent[source], me, int(memory.received[source][me]) + 1)

    def _read_message(self, source: int) -> Iterator[int]:
        """Put the next message of a peer aside, from where the recv that started first takes it."""
        memory, me, arrivals = self._memory, self._memory.rank, self._arrivals[source]
        received, packet = memory.received[source], memory.packets[source, me]
        arrivals.is_busy = True
        message, arrived, tag = torch.empty(0, dtype=torch.uint8), -1, 0
        while arrived < len(message):
            while not self._has_packet(source):
                yield source
            if arrived < 0:
                tag, total = packet[:16].view(torch.int64).tolist()
                message, arrived = torch.empty(total, dtype=torch.uint8), 0
            part = message[arrived : arrived + PACKET_BYTES]
            part.copy_(packet[PACKET_HEAD : PACKET_HEAD + len(part)])
            arrived += len(part)
            memory.publish(received, me, int(received[me]) + 1)
        arrivals.messages.append((tag, message))
        arrivals.is_busy = False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _signature(request: Request) -> int:
    """The same on all ranks that mean the same call. The lengths of an all-to-all are compared when all are known."""
    lengths: int | tuple[int, ...] = request.length
    if request.numbers and request.kind in (codes.ALL_GATHER, codes.REDUCE_SCATTER):
        lengths = request.numbers
    elif request.numbers and request.kind == codes.ALL_TO_ALL:
        lengths = -1
    return hash((request.kind, request.type, request.op, request.root, lengths))
