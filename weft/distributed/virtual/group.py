"""A rank's view of the virtual cluster: its group and its clock."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from weft.distributed.collectives import AlgorithmChoice, start_rounds
from weft.distributed.group.calls import AllGather, Call, Recv, Send
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.virtual.network import VirtualNetwork
from weft.distributed.virtual.trace import TraceEvent
from weft.distributed.virtual.works import CollectiveWork, Membership, MessageWork
from weft.errors import PeerLostError, UsageError

__all__ = ["VirtualClock", "VirtualGroup"]

FindMembership = Callable[[tuple[int, int, int], tuple[int, ...]], Membership]
"""From (parent's number, how many splits came before, colour) and the ranks to the membership that they share."""


@final
class VirtualClock(AbstractClock):
    """Virtual seconds since the run began. Time passes in `charge`, `wait_until` and while waiting for work."""

    def __init__(self, network: VirtualNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank

    def now(self) -> float:
        return self._network.scheduler.now

    def charge(self, seconds: float) -> None:
        if seconds < 0:
            raise UsageError(f"computation took less than no time (seconds: {seconds}); charge 0 or more")
        self._pass_until(self.now() + seconds, "compute")

    def wait_until(self, moment: float) -> None:
        self._pass_until(moment, "idle")

    def _pass_until(self, moment: float, what: str) -> None:
        began = self.now()
        self._network.scheduler.sleep_until(self._rank, moment)
        if self._network.trace is not None and moment > began:
            self._network.trace.append(TraceEvent(self._rank, began, moment, what))


@final
class VirtualGroup(AbstractGroup):
    """Messages over modelled links, collectives by our own algorithms, advancing while the rank computes.

    `is_done` takes no virtual time: a loop that only polls it never ends; charge or wait in between.
    """

    def __init__(
        self,
        network: VirtualNetwork,
        membership: Membership,
        rank: int,
        *,
        choice: AlgorithmChoice,
        find_membership: FindMembership,
        generation: int = 0,
    ) -> None:
        clock = VirtualClock(network, membership.ranks[rank])
        super().__init__(rank, len(membership.ranks), clock=clock, generation=generation)
        self._network = network
        self._membership = membership
        self._cluster_rank = membership.ranks[rank]
        self._choice = choice
        self._find_membership = find_membership
        self._num_collectives = 0
        self._num_splits = 0
        self._is_closed = False

    @property
    def network(self) -> VirtualNetwork:
        """The network, which all ranks of the cluster share."""
        return self._network

    @property
    def cluster_rank(self) -> int:
        """The rank in the whole cluster, from which a group that was split off counts anew."""
        return self._cluster_rank

    def start(self, call: Call) -> AbstractWork:
        self._network.scheduler.check()
        if self._is_closed:
            raise UsageError(f"group is closed (call: {type(call).__name__}); start a new one")
        check_call(call, self._rank, self.size)
        try:
            self._membership.check()
        except PeerLostError as error:
            return _LostWork(error)
        if isinstance(call, Send | Recv):
            return self._start_message(call)
        # User tags are not negative, so the numbers of collectives, counted down from -1, never meet them.
        self._num_collectives += 1
        rounds = start_rounds(call, self._rank, self.size, -self._num_collectives, self._choice)
        assert rounds is not None, "messages are all that this transport has"
        return CollectiveWork(
            self._network,
            self._membership,
            self._cluster_rank,
            number=self._num_collectives,
            rounds=rounds,
            name=type(call).__name__,
        )

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        table = torch.empty(self.size, 2, dtype=torch.int64)
        self.run(AllGather(table, torch.tensor([[colour, key]])))
        rows = enumerate(table.tolist())
        same = sorted((its_key, rank) for rank, (its_colour, its_key) in rows if its_colour == colour)
        ranks = tuple(self._membership.ranks[rank] for _, rank in same)
        self._num_splits += 1
        name = (self._membership.number, self._num_splits, colour)
        choice = self._choice.for_part([rank for _, rank in same])
        return VirtualGroup(
            self._network,
            self._find_membership(name, ranks),
            ranks.index(self._cluster_rank),
            choice=choice,
            find_membership=self._find_membership,
            generation=self._generation,
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        self._is_closed = True

    def _start_message(self, call: Send | Recv) -> AbstractWork:
        work = MessageWork(self._network, self._membership, self._cluster_rank, call)
        work.start(is_send=isinstance(call, Send))
        return work


@final
class _LostWork(AbstractWork):
    """A call that was started after a peer had been lost."""

    def __init__(self, error: PeerLostError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def is_done(self) -> bool:
        return True
