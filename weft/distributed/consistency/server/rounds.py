"""Updates in rounds: one for each step, of the gradients of many ranks, added in the order of ranks.

stale(s), by clock   round t is closed when every rank has pushed its step t; a rank may begin step t as soon as
                     round t - s - 1 is closed (s = 0: the synchronous run, to the last bit)
backup(b)            round t is closed by the first N - b of N gradients, or at a deadline; those that come after
                     are dropped, and their ranks go on at the open round (Chen et al., 2016)

round 5   rank 0 ====>|        rank 2 comes too late: its gradient is dropped,
          rank 1 ===> |        and it takes part in round 6 next
          rank 2 =====|=======>x
"""

import math
from collections.abc import Sequence
from typing import final

from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Leave, Push, Release
from weft.distributed.consistency.server.policy import NEVER, AbstractPolicy

__all__ = ["ArrivalTimes", "Rounds"]

WINDOW = 32
"""Rounds that are looked back upon."""

LEAST = 8
"""Rounds before anything is concluded."""

SLACK = 1.1
"""A rank that was late by a hair begins the next round as much too late, and would be late for ever."""


@final
class ArrivalTimes:
    """Seconds from the opening of a round to each of its gradients, those that came too late included.

    >>> times = ArrivalTimes()
    >>> for number in range(9):
    ...     times.open(number, now=10.0 * number)
    ...     for seconds in (1.0, 1.1, 1.2, 9.0):
    ...         times.note(number, now=10.0 * number + seconds)
    >>> round(times.best(enough=4), 6)
    1.32
    """

    def __init__(self) -> None:
        self._opened: dict[int, float] = {}
        self._arrivals: dict[int, list[float]] = {}

    def open(self, number: int, now: float) -> None:
        self._opened[number], self._arrivals[number] = now, []
        if len(self._opened) > WINDOW:
            old = next(iter(self._opened))
            del self._opened[old], self._arrivals[old]

    def note(self, number: int, now: float) -> None:
        if number in self._opened:
            self._arrivals[number].append(now - self._opened[number])

    def best(self, enough: int) -> float:
        """The deadline that would have used the most gradients a second, in all rounds but the open one, and a little.

        By it a round uses the gradients that have come, up to `enough`, and lasts that long, or until there are enough.
        Rounds are not asked to be whole: a rank that computes for an earlier one is missed by any deadline alike.
        """
        closed = [sorted(arrivals) for arrivals in list(self._arrivals.values())[:-1] if arrivals]
        if len(closed) < LEAST:
            return NEVER
        num_ended, seconds_of_ended, best = 0, 0.0, (0.0, NEVER)
        in_time = sorted((seconds, k) for arrivals in closed for k, seconds in enumerate(arrivals[:enough], 1))
        for used, (seconds, number) in enumerate(in_time, 1):
            if number == enough:
                num_ended += 1
                seconds_of_ended += seconds
            total = seconds_of_ended + (len(closed) - num_ended) * seconds
            best = max(best, (used / total if total > 0 else NEVER, seconds))
        return SLACK * best[1]


@final
class Rounds(AbstractPolicy):
    """Args:
    bound: rounds that a rank may be ahead of the last closed one.
    spare: ranks of the `num_workers` that a round does not wait for.
    deadline: seconds after which a round is closed if anything has come; infinite for none, None to find the best
        from the arrivals so far.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        bound: int = 0,
        spare: int = 0,
        deadline: float | None = math.inf,
        is_fresh: bool = True,
    ) -> None:
        self._num_workers = num_workers
        self._bound = bound
        self._spare = spare
        self._deadline = deadline
        self._round = 0
        self._opened_at: float | None = None
        # Rank -> the first round that it takes part in. A shard that was restored learns it from the ranks.
        self._members = dict.fromkeys(range(num_workers), 0) if is_fresh else {}
        self._pushed: dict[int, dict[int, None]] = {}  # round -> the ranks whose gradient is here
        self._waiting: dict[int, int] = {}  # rank -> the earliest step it may take next
        self._times = ArrivalTimes()
        self._seconds = NEVER if deadline is None else deadline  # after which the open round is closed
        self._is_stopped = False

    def arrive(self, rank: int, step: int | None, now: float) -> Sequence[Decision]:
        decisions: list[Decision] = []
        if self._opened_at is None:
            self._opened_at = now
            self._times.open(self._round, now)
        if rank not in self._members:
            decisions.append(Join(rank))
            self._members[rank] = self._round
        self._members[rank] = max(self._members[rank], step or 0)
        self._waiting[rank] = step or 0
        return [*decisions, *self._move_on(now)]

    def push(self, rank: int, step: int, now: float, others: Sequence[Push] = ()) -> Sequence[Decision]:
        assert not others, "gradients of a round come singly"
        self._times.note(step, now)
        self._waiting[rank] = step + 1
        if step < self._round:
            return [Drop(rank, step), *self._move_on(now)]
        self._pushed.setdefault(step, {})[rank] = None
        return self._move_on(now)

    def leave(self, rank: int, now: float) -> Sequence[Decision]:
        if rank not in self._members:
            return []
        del self._members[rank]
        self._waiting.pop(rank, None)
        return [Leave(rank), *self._move_on(now)]

    def stop(self) -> Sequence[Decision]:
        self._is_stopped = True
        return self._release()

    def alarm(self) -> float:
        """Once something has come, the moment at which the open round is closed whoever is missing."""
        if not self._pushed.get(self._round) or self._opened_at is None:
            return NEVER
        return self._opened_at + self._seconds

    def ring(self, now: float) -> Sequence[Decision]:
        return self._move_on(now)

    def _move_on(self, now: float) -> list[Decision]:
        """Close what can be closed, and let go whom that sets free."""
        decisions: list[Decision] = []
        while True:
            if self._members and min(self._members.values()) > self._round and self._round not in self._pushed:
                self._open(min(self._members.values()), now)  # nobody takes part in the rounds before
            if not self._is_closing(now):
                break
            decisions.append(Commit(tuple((rank, self._round) for rank in sorted(self._pushed.pop(self._round)))))
            self._open(self._round + 1, now)
        return [*decisions, *self._release()]

    def _is_closing(self, now: float) -> bool:
        here = self._pushed.get(self._round, {})
        if not here:
            return False
        members = [rank for rank, first in self._members.items() if first <= self._round]
        missing = sum(rank not in here for rank in members)
        # The dead are not waited for, and use up the spare ones.
        return missing <= max(0, len(members) - self._enough) or now >= self.alarm()

    @property
    def _enough(self) -> int:
        return self._num_workers - self._spare

    def _open(self, number: int, now: float) -> None:
        self._round, self._opened_at = number, now
        self._times.open(number, now)
        if self._deadline is None:
            self._seconds = self._times.best(self._enough)

    def _release(self) -> list[Release]:
        free = [r for r, earliest in self._waiting.items() if self._is_stopped or earliest <= self._round + self._bound]
        return [Release(rank, max(self._waiting.pop(rank), self._round), self._is_stopped) for rank in free]
