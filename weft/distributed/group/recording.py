"""A group that counts what passes through it: calls and bytes per kind of call and per peer."""

from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call
from weft.distributed.group.group import AbstractGroup, AbstractWork

__all__ = ["GroupTraffic", "RecordingGroup", "handed_bytes", "message_bytes", "wire_bytes"]

Key = TypeVar("Key")


def message_bytes(call: Call) -> int:
    """Bytes of the tensor that the call brings, or that it fills where it brings none."""
    return 0 if isinstance(call, calls.Barrier) else call.tensor.nbytes


def handed_bytes(call: Call) -> int:
    """Bytes that a rank hands to the transport in a call: those of its message; none of one that it only receives."""
    return 0 if isinstance(call, calls.Recv) else message_bytes(call)


def wire_bytes(call: Call, rank: int, size: int) -> int:
    """Bytes that leave a rank in a call, by the algorithms that send least: what native groups do where ranks are on
    different hosts. Of an all-reduce of n bytes that is 2 n (P - 1) / P, of an all-gather (P - 1) n, P the size.

    Args:
        call: that the rank starts.
        rank: who sends.
        size: of the group.
    """
    match call:
        case calls.Send(tensor):
            return tensor.nbytes
        case calls.AllGather(_, tensor):
            return (size - 1) * tensor.nbytes
        case calls.AllReduce(tensor):
            return 2 * tensor.nbytes * (size - 1) // size
        case calls.ReduceScatter(_, tensor, _, sizes) | calls.AllToAll(_, tensor, sizes, _):
            own = 1 / size if sizes is None else sizes[rank] / max(sum(sizes), 1)
            return round(tensor.nbytes * (1 - own))
        case calls.NeighbourAllReduce(tensor, graph):
            return tensor.nbytes * sum(rank in sources for sources in graph)
        case calls.Broadcast(tensor, root):
            return tensor.nbytes if rank == root else 0
        case calls.Reduce(tensor, root):
            return tensor.nbytes if rank != root else 0
    return 0


@dataclass(frozen=True)
class GroupTraffic:
    """Counts by the name of the call (`Send`, `AllReduce`, ...) and, for messages, by the rank of the peer.

    Bytes of a collective are those of its message. What a transport sends for it shows per peer only where the
    collective is made of messages and the recording lies below it.
    """

    num_calls: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    sent_to: dict[int, int] = field(default_factory=dict)
    received_from: dict[int, int] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent_to.values())

    def with_call(self, call: Call) -> "GroupTraffic":
        """The traffic after one more call."""
        name, size = type(call).__name__, message_bytes(call)
        return GroupTraffic(
            _added(self.num_calls, name, 1),
            _added(self.num_bytes, name, size),
            _added(self.sent_to, call.peer, size) if isinstance(call, calls.Send) else self.sent_to,
            _added(self.received_from, call.peer, size) if isinstance(call, calls.Recv) else self.received_from,
        )


def _added(counts: dict[Key, int], key: Key, amount: int) -> dict[Key, int]:
    return {**counts, key: counts.get(key, 0) + amount}


@final
class RecordingGroup(AbstractGroup):
    """Wraps any group and changes nothing but its own counts. Groups that are split off count for themselves."""

    def __init__(self, inner: AbstractGroup) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner
        self._traffic = GroupTraffic()

    @property
    def traffic(self) -> GroupTraffic:
        """The counts so far."""
        return self._traffic

    @property
    def inner(self) -> AbstractGroup:
        """The group that this one wraps."""
        return self._inner

    def start(self, call: Call) -> AbstractWork:
        work = self._inner.start(call)
        self._traffic = self._traffic.with_call(call)
        return work

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> "RecordingGroup":
        return RecordingGroup(self._inner.split(colour, key))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()
