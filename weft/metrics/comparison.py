"""The comparison of two sets of values of one metric, with a verdict in words.

A is the base and B is judged. The ratio says how many times better B is: above 1 B is better, below 1 it is worse.

    direction   ratio
    lower       median(A) / median(B)     "B is faster" means that it takes less time
    higher      median(B) / median(A)
    neither     median(B) / median(A)     no better and worse: the verdict says larger or smaller
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.errors import ComparisonError
from weft.metrics.metric import Direction, Metric
from weft.metrics.statistics import (
    MIN_VALUES_FOR_RATIO,
    Interval,
    Summary,
    mann_whitney_p,
    ratio_interval,
    ratio_of_medians,
    summarise,
)

__all__ = ["NO_DIFFERENCE", "Comparison", "PairedComparison", "compare", "compare_pairs"]

NO_DIFFERENCE = "no difference shown"

T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """Two sets of values, how many times better B is, and whether that is more than chance."""

    metric: Metric
    a: Summary
    b: Summary
    ratio: float  # not-a-number where a ratio has no meaning
    ratio_interval: Interval
    p_value: float
    verdict: str  # "B is faster", "B is worse", "no difference shown", ...
    reason: str  # what the verdict rests on, or what is missing for one

    @property
    def is_shown(self) -> bool:
        return self.verdict != NO_DIFFERENCE


@dataclass(frozen=True)
class PairedComparison:
    """The ratio within pairs of neighbouring measurements: above 1, B is better."""

    ratio: float  # the median over the pairs
    interval: Interval
    count: int
    verdict: str
    reason: str


def compare(a: Sequence[float], b: Sequence[float], metric: Metric, *, confidence: float = 0.95) -> Comparison:
    """Compare independent values of a metric. A value that is not finite is a failed run and counts as the worst.

    A difference is shown when both the ranks (Mann-Whitney) and the interval of the ratio of medians say so.

    >>> from weft.metrics.metric import METRICS
    >>> result = compare([2.0, 2.1, 2.2, 2.1, 2.0], [1.0, 1.1, 1.0, 1.1, 1.0], METRICS["step_time"])
    >>> result.verdict, result.ratio
    ('B is faster', 2.1)
    """
    a_values, b_values = _as_ranked(a, metric.direction), _as_ranked(b, metric.direction)
    if not len(a_values) or not len(b_values):
        raise ComparisonError(f"nothing to compare ({metric.name}, A: {len(a_values)} values, B: {len(b_values)})")
    above, below = (_as_amount(values) for values in _oriented(a_values, b_values, metric.direction))
    if min(above.min(), below.min()) < 0:
        ratio, interval = math.nan, Interval(math.nan, math.nan)
    else:
        ratio, interval = ratio_of_medians(above, below), ratio_interval(above, below, confidence)
    summary_a, summary_b = summarise(a_values, confidence), summarise(b_values, confidence)
    p_value = mann_whitney_p(a_values, b_values)
    doubt = _doubt(summary_a, summary_b, interval, p_value, confidence)
    larger, smaller = _oriented(summary_a.median, summary_b.median, metric.direction)
    verdict = NO_DIFFERENCE if doubt else _verdict(metric, b_is_ahead=larger > smaller)
    reason = doubt or f"the values differ (p {_p_text(p_value)})"
    return Comparison(metric, summary_a, summary_b, ratio, interval, p_value, verdict, reason)


def compare_pairs(
    a: Sequence[float], b: Sequence[float], metric: Metric, *, confidence: float = 0.95
) -> PairedComparison:
    """Compare values that were measured in turn: the median of the ratios of pairs, with its exact interval.

    What disturbs both measurements of a pair cancels in their ratio, so this sees smaller differences than `compare`
    on a machine whose speed drifts. A pair that failed on both sides counts as equal.
    """
    if len(a) != len(b) or not len(a):
        raise ComparisonError(f"pairs need as many values on both sides (A: {len(a)}, B: {len(b)}); measure in turn")
    a_values, b_values = (_as_amount(_as_ranked(values, metric.direction)) for values in (a, b))
    if min(a_values.min(), b_values.min()) < 0:
        raise ComparisonError(f"a ratio of negative values has no meaning ({metric.name}); compare them unpaired")
    above, below = _oriented(a_values, b_values, metric.direction)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(above == below, 1.0, above / below)
    pairs = summarise(ratios, confidence)
    if not pairs.interval.is_known:
        verdict, reason = NO_DIFFERENCE, f"too few pairs (pairs: {pairs.count}); measure more"
    elif 1.0 in pairs.interval:
        verdict, reason = NO_DIFFERENCE, f"the interval of the ratio holds 1 ({pairs.interval})"
    else:
        verdict, reason = _verdict(metric, b_is_ahead=pairs.median > 1), f"the interval excludes 1 ({pairs.interval})"
    return PairedComparison(pairs.median, pairs.interval, pairs.count, verdict, reason)


def _doubt(a: Summary, b: Summary, ratio: Interval, p_value: float, confidence: float) -> str:
    """Why no difference is shown; empty when one is."""
    missing = {name: MIN_VALUES_FOR_RATIO - side.count for name, side in (("A", a), ("B", b))}
    short = [f"{name} at least {count} more" for name, count in missing.items() if count > 0]
    if short:
        return f"too few values (A: {a.count}, B: {b.count}); repeat {' and '.join(short)}"
    if math.isinf(a.median) and a == b:
        return "both failed"
    if p_value >= 1 - confidence:
        return f"the values overlap (p {_p_text(p_value)})"
    if a.median == b.median or 1.0 in ratio:
        return f"the interval of the ratio holds 1 ({ratio})"
    return ""


def _verdict(metric: Metric, *, b_is_ahead: bool) -> str:
    ahead, behind = "better", "worse"
    if metric.direction == "neither":
        ahead, behind = "larger", "smaller"
    elif metric.unit == "s" or metric.unit.endswith("/s"):
        ahead, behind = "faster", "slower"
    return f"B is {ahead if b_is_ahead else behind}"


def _oriented(a: T, b: T, direction: Direction) -> tuple[T, T]:
    """Numerator and denominator, so that a ratio above 1 favours B."""
    return (a, b) if direction == "lower" else (b, a)


def _as_ranked(values: Sequence[float], direction: Direction) -> NDArray[np.float64]:
    """Failures (values that are not finite, whatever their sign) at the worse end of the order."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, -np.inf if direction == "higher" else np.inf)


def _as_amount(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values to divide: what failed took for ever, so its rate is zero."""
    return np.where(np.isneginf(values), 0.0, values)


def _p_text(p_value: float) -> str:
    return "< 0.0001" if p_value < 1e-4 else f"= {p_value:.2g}"
