"""A curve in one line of text: how a value went during training."""

import itertools
import math
from collections.abc import Sequence

__all__ = ["sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-=*#"  # for terminals that know ASCII only


def sparkline(values: Sequence[float], width: int = 24, *, unicode: bool = True) -> str:
    """The values from left to right, each character the mean of its share of them; what is not finite is a `!`.

    >>> sparkline([1.0, 2.0, 3.0, 4.0]), sparkline([1.0, math.inf, 4.0], unicode=False)
    ('▁▃▆█', '_!#')
    """
    marks = BLOCKS if unicode else PLAIN
    shown = shrink(values, width)
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_mark(value, low, high, marks) for value in shown)


def shrink(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values, the means of consecutive shares whose sizes differ by at most one."""
    if len(values) <= width:
        return list(values)
    cuts = [i * len(values) // width for i in range(width + 1)]
    # Divided first: the sum of large values could overflow where their mean does not.
    return [sum(v / (end - begin) for v in values[begin:end]) for begin, end in itertools.pairwise(cuts)]


def _mark(value: float, low: float, high: float, marks: str) -> str:
    if not math.isfinite(value):
        return "!"
    if high == low:
        return marks[0]
    # Halved first: the difference of two large values of opposite sign could overflow.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return marks[min(int(share * len(marks)), len(marks) - 1)]
