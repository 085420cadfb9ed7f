"""N ranks in one process: real tensors and real mathematics under a virtual clock and a modelled network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch

from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group.faulty import Fault, FaultyGroup
from weft.distributed.group.group import AbstractGroup
from weft.distributed.virtual.group import VirtualGroup
from weft.distributed.virtual.network import AbstractWait, VirtualNetwork
from weft.distributed.virtual.process_state import AbstractProcessState, RandomState
from weft.distributed.virtual.scheduler import Scheduler
from weft.distributed.virtual.trace import TraceEvent
from weft.distributed.virtual.works import CollectiveWork, Membership
from weft.errors import TrainingError
from weft.planning.network import TEN_GIGABIT, LinkSchedule, NetworkModel
from weft.specs import CPU

__all__ = ["VirtualResult", "die", "run_virtual"]

MOST_WAITS_TOLD = 16


@dataclass(frozen=True)
class VirtualResult:
    """The results of the ranks (None where one died), and what they took in virtual time."""

    results: tuple[Any, ...]
    seconds: tuple[float, ...]
    """When each rank ended, in virtual time."""
    bytes_sent: tuple[int, ...]
    num_messages: int
    num_events: int
    num_switches: int
    trace: tuple[TraceEvent, ...]


class _DeathError(BaseException):
    """Ends the thread of a rank that is killed. Not an Exception: a program cannot survive it."""


def die() -> NoReturn:
    """End this virtual rank as if its host had lost power."""
    raise _DeathError


def run_virtual(
    program: Callable[[AbstractGroup], Any],
    size: int,
    *,
    network: NetworkModel = TEN_GIGABIT,
    choice: AlgorithmChoice | None = None,
    faults: Sequence[Fault] = (),
    timeout: float = 60.0,
    notice: float = 1.0,
    generation: int = 0,
    trace: bool = False,
    device: torch.device = CPU,
    state: AbstractProcessState | None = None,
) -> VirtualResult:
    """Run `program(group)` on `size` virtual ranks, the same way every time.

    Every rank begins with the caller's torch random state and has one of its own. The first rank that fails ends the
    run, and its error is raised, with a note that tells the rank.

    Args:
        choice: of all-reduce algorithms; by default the fastest on the network, by message size.
        timeout: virtual seconds after which a peer that keeps a rank waiting is lost.
        notice: virtual seconds after which a peer that died is lost.
        trace: whether the result tells what each rank did when.
        device: the one that all ranks compute on.
        state: what every rank has of the process for itself; by default the random state of torch.

    >>> import torch
    >>> from weft.planning.cluster import Link
    >>> def program(group):
    ...     group.clock.charge(0.5)
    ...     total = torch.full((4,), float(group.rank))
    ...     group.all_reduce(total)
    ...     return total[0].item()
    >>> result = run_virtual(program, 4, network=NetworkModel(Link(alpha=0.25, beta=0.0)))
    >>> result.results, result.seconds
    ((6.0, 6.0, 6.0, 6.0), (1.5, 1.5, 1.5, 1.5))
    """
    chosen = choice or AlgorithmChoice(network=network)
    cluster = _Cluster(size, network, chosen, timeout, notice, trace=trace, state=state or RandomState(device))
    return cluster.run(program, faults, generation)


@final
class _Cluster:
    """Everything that the ranks of one run share."""

    def __init__(
        self,
        size: int,
        network: NetworkModel,
        choice: AlgorithmChoice,
        timeout: float,
        notice: float,
        *,
        trace: bool,
        state: AbstractProcessState,
    ) -> None:
        self._size = size
        self._choice = choice
        self._timeout = timeout
        self._notice = notice
        self._scheduler = Scheduler(size, timeout, self._on_timeout, state)
        links = LinkSchedule(network, size)
        self._network = VirtualNetwork(self._scheduler, links, size, gamma=network.gamma, trace=trace)
        self._lost: set[int] = set()
        self._memberships: dict[tuple[int, int, int], Membership] = {}
        self._everyone = self._find_membership((0, 0, 0), tuple(range(size)))
        self._results: list[Any] = [None] * size
        self._seconds = [0.0] * size

    def run(self, program: Callable[[AbstractGroup], Any], faults: Sequence[Fault], generation: int) -> VirtualResult:
        def body(rank: int) -> None:
            group: AbstractGroup = VirtualGroup(
                self._network,
                self._everyone,
                rank,
                choice=self._choice,
                find_membership=self._find_membership,
                generation=generation,
            )
            if faults:
                group = FaultyGroup(group, faults, die=die)
            try:
                self._results[rank] = program(group)
                for transport in self._network.transports.values():
                    transport.end(rank)
            except _DeathError:
                self._report_death(rank)
            finally:
                self._seconds[rank] = self._scheduler.now

        self._scheduler.run(body)
        if self._scheduler.failure is not None:
            rank, error = self._scheduler.failure
            if rank is not None:
                error.add_note(f"on rank {rank} of {self._size}, after {self._seconds[rank]:.6g} virtual seconds")
            raise error
        return VirtualResult(
            results=tuple(self._results),
            seconds=tuple(self._seconds),
            bytes_sent=tuple(self._network.bytes_sent),
            num_messages=self._network.num_messages,
            num_events=self._scheduler.num_events,
            num_switches=self._scheduler.num_switches,
            trace=tuple(self._network.trace or ()),
        )

    def _find_membership(self, name: tuple[int, int, int], ranks: tuple[int, ...]) -> Membership:
        if name not in self._memberships:
            self._memberships[name] = Membership(len(self._memberships), ranks)
            for rank in self._lost.intersection(ranks):
                self._memberships[name].lose(rank, "it was lost before")
        return self._memberships[name]

    def _report_death(self, rank: int) -> None:
        moment = self._scheduler.now + self._notice
        self._scheduler.at(moment, rank, lambda: self._lose(rank, "it died"))

    def _lose(self, rank: int, reason: str) -> None:
        self._lost.add(rank)
        for membership in self._memberships.values():
            if rank in membership.ranks:
                membership.lose(rank, reason)
        for waiting, work in self._network.waits.items():
            if work.is_hopeless():
                self._scheduler.resume(waiting)
        for transport in self._network.transports.values():
            transport.lose(rank, reason)

    def _on_timeout(self, rank: int) -> None:
        """A rank has waited for long: find whom it waits for in the end."""
        chain = self._chain(self._network.waits[rank])
        last = chain[-1]
        if isinstance(last, int):
            reason = "it left" if self._scheduler.is_over(last) else f"silent for {self._timeout:g} s"
            self._lose(last, reason)
        elif last in chain[:-1] or not self._scheduler.has_events:
            self._scheduler.fail(None, TrainingError(self._deadlock_text()))
        else:
            self._scheduler.mark_parked(rank)

    def _chain(self, work: AbstractWait) -> list[AbstractWait | int]:
        """Who waits for whom: ends in a rank that has not come, in a work seen before, or in one that is moving."""
        chain: list[AbstractWait | int] = [work]
        while awaited := work.awaited():
            peer = awaited[0]
            following: AbstractWait | None = None
            if isinstance(work, CollectiveWork):
                following = work.membership.collectives.get((work.number, peer))
            if following is None:
                following = self._network.waits.get(peer)
            if following is None:
                return [*chain, peer]
            chain.append(following)
            if following in chain[:-1]:
                break
            work = following
        return chain

    def _deadlock_text(self) -> str:
        lines = self._scheduler.lines()
        waits = [f"rank {rank} {work.tell()}{lines[rank]}" for rank, work in sorted(self._network.waits.items())]
        more = f"; and {len(waits) - MOST_WAITS_TOLD} more" if len(waits) > MOST_WAITS_TOLD else ""
        return (
            f"ranks wait for each other ({'; '.join(waits[:MOST_WAITS_TOLD])}{more}); "
            "start the calls in the same order on all ranks"
        )
