"""Updates as gradients arrive: asynchronous, or with a bound on how far apart ranks are.

    rank 0   [step][step][step][step]            every push is an update of its own, and is answered with
    rank 1   [  step  ][  step  ][  st           the weights as they are then; with a bound of s, a rank that
    rank 2   [step][step]..waits..[step]         has taken s steps more than the slowest waits for it

Work is dealt out as it is asked for: step i is share i mod N of global batch i div N, so a fast rank takes more of an
epoch than a slow one, and every sample is taken once. Asynchronous: DistBelief (Dean et al., 2012); with a bound:
stale-synchronous (Ho et al., 2013).
"""

from collections.abc import Sequence
from typing import final

from weft.distributed.consistency.control import WorkQueue
from weft.distributed.consistency.server.decisions import Commit, Decision, Join, Leave, Push, Release
from weft.distributed.consistency.server.policy import NEVER, AbstractPolicy

__all__ = ["Arrival"]


@final
class Arrival(AbstractPolicy):
    """Args:
    bound: how many steps a rank may be ahead of the slowest; NEVER, which is infinite, for asynchronous.
    """

    def __init__(self, num_workers: int, bound: float = NEVER, *, is_fresh: bool = True) -> None:
        self._bound = bound
        # Steps that each rank has taken. A shard that was restored learns of a rank when it comes: some may be gone.
        self._clocks = dict.fromkeys(range(num_workers), 0) if is_fresh else {}
        self._expected = set(self._clocks)  # those that have not come yet
        self._work = WorkQueue(num_workers)
        self._waiting: dict[int, int] = {}  # rank -> its next step; in the order in which they asked
        self._has_begun = not is_fresh  # whether work has been dealt out
        self._is_stopped = False

    def arrive(self, rank: int, step: int | None, now: float) -> Sequence[Decision]:
        decisions: list[Decision] = []
        if rank not in self._clocks:
            # One that comes back neither holds up the others nor is far ahead of them.
            self._clocks[rank] = min(self._clocks.values(), default=0)
            decisions.append(Join(rank))
        self._waiting[rank] = self._first_step(rank, step)
        self._expected.discard(rank)
        self._has_begun = True
        return [*decisions, *self._release()]

    def push(self, rank: int, step: int, now: float, others: Sequence[Push] = ()) -> Sequence[Decision]:
        pushes = ((rank, step), *others)
        for pusher, _ in pushes:
            if pusher in self._clocks:  # a host server may still bring what a rank left behind
                self._clocks[pusher] += 1
                self._waiting[pusher] = self._work.take()
        return [Commit(pushes), *self._release()]

    def leave(self, rank: int, now: float) -> Sequence[Decision]:
        if rank not in self._clocks:
            return []
        del self._clocks[rank]
        self._expected.discard(rank)
        self._waiting.pop(rank, None)
        return [Leave(rank), *self._release()]

    def stop(self) -> Sequence[Decision]:
        self._is_stopped = True
        return self._release()

    def alarm(self) -> float:
        return NEVER

    def ring(self, now: float) -> Sequence[Decision]:
        return []

    def _first_step(self, rank: int, step: int | None) -> int:
        """The first step of a rank when it comes; `step` is where it goes on."""
        if step is None and rank in self._expected:
            return rank  # the first steps are dealt out in advance, so that the start is the same every time
        if step is not None and not self._has_begun:
            # Nothing is dealt out in advance where a training goes on, be it before every rank has taken a step.
            self._work = WorkQueue(step)
        self._work.skip_to(step or 0)
        return self._work.take()

    def _release(self) -> list[Release]:
        slowest = min(self._clocks.values(), default=0)
        free = [rank for rank in self._waiting if self._is_stopped or self._clocks[rank] - slowest <= self._bound]
        return [Release(rank, self._waiting.pop(rank), self._is_stopped) for rank in free]
