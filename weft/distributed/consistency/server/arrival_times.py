"""How long gradients take to arrive, and when to stop waiting for the rest."""

from collections import deque
from typing import final

from weft.distributed.consistency.server.policy import NEVER

__all__ = ["ArrivalTimes"]

WINDOW = 32
"""Rounds that are looked back upon."""

LEAST = 8
"""Rounds before anything is concluded."""


@final
class ArrivalTimes:
    """Seconds from the opening of a round to each of its gradients, those that came too late included.

    >>> times = ArrivalTimes()
    >>> for number in range(8):
    ...     times.open(number, now=10.0 * number)
    ...     for seconds in (1.0, 1.1, 1.2, 9.0):
    ...         times.note(number, now=10.0 * number + seconds)
    >>> round(times.best(), 6)
    1.2
    """

    def __init__(self) -> None:
        self._opened: dict[int, float] = {}
        self._arrivals: dict[int, list[float]] = {}
        self._recent: deque[int] = deque()

    def open(self, number: int, now: float) -> None:
        self._opened[number], self._arrivals[number] = now, []
        self._recent.append(number)
        if len(self._recent) > WINDOW:
            old = self._recent.popleft()
            self._opened.pop(old, None)
            self._arrivals.pop(old, None)

    def note(self, number: int, now: float) -> None:
        if number in self._opened:
            self._arrivals[number].append(now - self._opened[number])

    def best(self) -> float:
        """The deadline after which waiting for one more costs more than its gradient is worth.

        Of k gradients in t_k seconds, on average, the k with the most gradients a second is kept; the deadline is the
        time in which nine rounds of ten have had as many.
        """
        rounds = [sorted(arrivals) for arrivals in self._arrivals.values() if arrivals]
        most = max(map(len, rounds), default=0)
        whole = [arrivals for arrivals in rounds if len(arrivals) == most]
        if len(whole) < LEAST:
            return NEVER
        means = [sum(arrivals[k] for arrivals in whole) / len(whole) for k in range(most)]
        best = max(range(most), key=lambda k: (k + 1) / means[k] if means[k] > 0 else NEVER)
        seconds = sorted(arrivals[best] for arrivals in whole)
        return seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))]
