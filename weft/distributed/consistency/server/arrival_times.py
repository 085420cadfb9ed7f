"""How long gradients take to arrive, and when to stop waiting for the rest."""

from typing import final

from weft.distributed.consistency.server.policy import NEVER

__all__ = ["ArrivalTimes"]

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
