"""Where to cut a row of pieces, so that the slowest stage is as fast as can be.

    cost        3   1   4   1   5   9   2   6          3 stages of equal speed
    stages    [ 3   1   4   1 ][5   9 ][2   6 ]        the slowest takes 14
                                                       no other cut has a faster slowest stage

First by dynamic programming over the stages and the places of cuts: the least time T of the slowest stage,

    T(s, j) = min over i < j of max(T(s - 1, i), (c_i + ... + c_{j-1}) / speed_s)

then, among all cuts that are as fast, the one with the fewest bytes between stages.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

__all__ = ["Fits", "best_cuts"]

Fits = Callable[[int, int, int], bool]
"""Whether a stage, by number, can hold the pieces from one place up to another."""

_SLACK = 1.02  # of the slowest stage: times are measured no better, and fewer bytes are worth more


def best_cuts(
    costs: Sequence[float],
    speeds: Sequence[float],
    carried: Sequence[float] | None = None,
    fits: Fits = lambda stage, begin, end: True,
) -> tuple[int, ...] | None:
    """The places before which the row is cut, ascending, one fewer than stages; None if no cut fits.

    Args:
        costs: of the pieces in their order, in seconds or anything else that adds up.
        speeds: of the stages, relative to each other.
        carried: bytes between stages if the row is cut before each piece; the first is not asked for.
        fits: which stages are allowed; no stage is ever empty.

    >>> best_cuts([3, 1, 4, 1, 5, 9, 2, 6], speeds=[1, 1, 1])
    (4, 6)
    >>> best_cuts([1, 1, 1, 1, 1, 1], speeds=[2, 1])
    (4,)
    """
    sums = [0.0, *accumulate(costs)]

    def time(stage: int, begin: int, end: int) -> float:
        return (sums[end] - sums[begin]) / speeds[stage] if fits(stage, begin, end) else math.inf

    slowest, cuts = _search(len(costs), len(speeds), time, max)
    if math.isinf(slowest):
        return None
    if carried is None or not any(carried):
        return cuts

    def num_bytes(stage: int, begin: int, end: int) -> float:
        sent = carried[begin] if begin else 0.0
        return sent if time(stage, begin, end) <= slowest * _SLACK else math.inf

    return _search(len(costs), len(speeds), num_bytes, lambda before, own: before + own)[1]


def _search(
    num_pieces: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least joint cost of all stages, and its cuts."""
    best: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (num_pieces + 1)
    best[0] = (0.0, ())
    for stage in range(num_stages):
        after: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (num_pieces + 1)
        for end in range(stage + 1, num_pieces + 1):
            for begin in range(stage, end):
                before, cuts = best[begin]
                if before >= after[end][0]:
                    continue
                total = join(before, cost(stage, begin, end))
                if total < after[end][0]:
                    after[end] = (total, (*cuts, begin) if begin else cuts)
        best = after
    return best[num_pieces]
