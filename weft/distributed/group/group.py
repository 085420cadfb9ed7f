"""The group seam: ranks with fixed membership that exchange tensors, and stop together when one of them fails."""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, NeighbourGraph, ReduceOp, Sizes
from weft.distributed.group.clock import AbstractClock

__all__ = ["AbstractGroup", "AbstractWork", "DoneWork"]


class AbstractWork(ABC):
    """A call under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the call's tensors hold its result; raise what made it fail. May be called again."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""


@final
class DoneWork(AbstractWork):
    """A call that had ended when it was started."""

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class AbstractGroup(ABC):
    """Ranks that exchange tensors. `start` is the asynchronous form of a call; `run` and the named methods wait.

    Calls write their results in place, as `weft.distributed.group.calls` says of each.

    Rules, held by one contract suite over all kinds:
    - All ranks start the same collectives in the same order. Messages between two ranks with one tag keep their order.
    - A tensor given to a call is not touched by the caller until the call is done.
    - A peer that is dead, or silent for longer than the timeout, makes every call under way and every later one raise
      PeerLostError on every surviving rank, and the error names the peer.
    """

    def __init__(self, rank: int, size: int, *, clock: AbstractClock, generation: int = 0) -> None:
        self._rank, self._size, self._clock, self._generation = rank, size, clock, generation

    @final
    @property
    def rank(self) -> int:
        return self._rank

    @final
    @property
    def size(self) -> int:
        return self._size

    @final
    @property
    def generation(self) -> int:
        """Counts the memberships that came before this one: a group is never repaired, it is replaced."""
        return self._generation

    @final
    @property
    def clock(self) -> AbstractClock:
        return self._clock

    @abstractmethod
    def start(self, call: Call) -> AbstractWork: ...

    @abstractmethod
    def run(self, call: Call) -> None:
        """Start and wait. A transport may have a shorter way for it: small calls are counted in microseconds."""

    @abstractmethod
    def split(self, colour: int, key: int) -> "AbstractGroup":
        """The group of the ranks that gave the same colour, ordered by key, then by rank. A collective call."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor, uninitialised, that the transport can read in place: the fast way to communicate."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to call twice, and after a failure."""

    @final
    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        self.run(calls.Send(tensor, peer, tag))

    @final
    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        self.run(calls.Recv(tensor, peer, tag))

    @final
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        self.run(calls.AllReduce(tensor, op))

    @final
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum", sizes: Sizes | None = None) -> None:
        self.run(calls.ReduceScatter(output, tensor, op, sizes))

    @final
    def all_gather(self, output: Tensor, tensor: Tensor, sizes: Sizes | None = None) -> None:
        self.run(calls.AllGather(output, tensor, sizes))

    @final
    def all_to_all(
        self, output: Tensor, tensor: Tensor, send_sizes: Sizes | None = None, recv_sizes: Sizes | None = None
    ) -> None:
        self.run(calls.AllToAll(output, tensor, send_sizes, recv_sizes))

    @final
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.run(calls.Broadcast(tensor, root))

    @final
    def reduce(self, tensor: Tensor, root: int = 0, op: ReduceOp = "sum") -> None:
        self.run(calls.Reduce(tensor, root, op))

    @final
    def neighbour_all_reduce(
        self, tensor: Tensor, graph: NeighbourGraph, weights: tuple[tuple[float, ...], ...]
    ) -> None:
        self.run(calls.NeighbourAllReduce(tensor, graph, weights))

    @final
    def barrier(self) -> None:
        self.run(calls.Barrier())
