"""Statistics of repeated values that assume no distribution.

A value of infinity is a failed run: it takes part in every rank, so a median, an interval or a p-value stays right
when some runs failed. Not-a-number has no rank and is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError
from weft.metrics.metric import Statistic

__all__ = [
    "MIN_VALUES_FOR_RATIO",
    "STATISTICS",
    "UNKNOWN",
    "Interval",
    "Summary",
    "count_warmup",
    "mann_whitney_less_p",
    "mann_whitney_p",
    "median_interval",
    "olympic_mean",
    "ratio_interval",
    "ratio_of_medians",
    "repetitions_needed",
    "scipy_stats",
    "summarise",
]

Values = Sequence[float] | NDArray[np.float64]

MIN_VALUES_FOR_RATIO = 5
"""Below this many values on a side the percentile bootstrap covers less than it claims (simulated, log-normal values,
95% wanted: 89% with 3, 92% with 4, 97% with 5)."""

_MAX_ENUMERATED = 20_000  # ways to deal the values to two sides up to which each is tried
_MIN_VALUES_FOR_WARMUP = 10
_NORMAL_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True)
class Interval:
    """A closed interval. `Interval(-inf, inf)` (`UNKNOWN`) says that there are too few values for one."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}" if self.is_known else "unknown"

    @property
    def width(self) -> float:
        return 0.0 if self.low == self.high else self.high - self.low

    @property
    def is_known(self) -> bool:
        return self != UNKNOWN


UNKNOWN = Interval(-math.inf, math.inf)


@dataclass(frozen=True)
class Summary:
    """Repeated values in one line: how many, their median, and the interval that holds the true median."""

    count: int
    median: float
    interval: Interval

    def is_within(self, relative_width: float) -> bool:
        """Whether the whole width of the interval is at most this share of the median."""
        return self.interval.is_known and self.interval.width <= relative_width * abs(self.median)


def summarise(values: Values, confidence: float = 0.95) -> Summary:
    """Count, median and interval.

    >>> summarise([3.0, 1.0, 2.0])
    Summary(count=3, median=2.0, interval=Interval(low=-inf, high=inf))
    """
    array = _checked(values)
    return Summary(len(array), float(np.median(array)), median_interval(array, confidence))


def median_interval(values: Values, confidence: float = 0.95) -> Interval:
    """The exact interval of the median: two order statistics, ranks from the binomial distribution.

    The k-th smallest and k-th largest of n values enclose the true median unless fewer than k values fall on one side
    of it, which happens with probability 2 P(Binomial(n, 1/2) < k), whatever the distribution. At 95% this needs at
    least 6 values; with fewer no such interval exists, and the answer is `UNKNOWN`.

    >>> median_interval([4.0, 1.0, 3.0, 2.0, 6.0, 5.0])
    Interval(low=1.0, high=6.0)
    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).is_known
    False
    """
    ordered = np.sort(_checked(values))
    rank = _median_rank(len(ordered), confidence)
    return Interval(float(ordered[rank - 1]), float(ordered[-rank])) if rank else UNKNOWN


def repetitions_needed(values: Values, relative_width: float = 0.05, confidence: float = 0.95) -> int:
    """About how many more values bring the interval of the median within `relative_width` of the median.

    The width of the interval shrinks with the square root of the count (Hoefler & Belli, SC'15). Where that says
    nothing, because failures or a median of zero leave no finite relative width, the answer is as many again.

    >>> repetitions_needed([1.0, 2.0]), repetitions_needed([5.0] * 6)
    (4, 0)
    """
    summary = summarise(values, confidence)
    if not summary.interval.is_known:
        fewest = next(n for n in range(summary.count + 1, summary.count + 100) if _median_rank(n, confidence))
        return fewest - summary.count
    if summary.is_within(relative_width):
        return 0
    if not math.isfinite(summary.interval.width) or summary.median == 0:
        return summary.count
    excess = summary.interval.width / (relative_width * abs(summary.median))
    return math.ceil(summary.count * excess**2) - summary.count


def ratio_of_medians(numerator: Values, denominator: Values) -> float:
    """median / median; not-a-number where it has no meaning (0/0, infinity/infinity)."""
    return float(_divide(np.median(_checked(numerator)), np.median(_checked(denominator))))


def ratio_interval(
    numerator: Values, denominator: Values, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The percentile bootstrap interval of the ratio of two medians of values that are not negative.

    Percentile and not BCa: the jackknife that BCa leans on is inconsistent for the median. A resample whose ratio has
    no meaning (0/0, infinity/infinity) could be anything, so it widens the interval on both sides.

    >>> ratio_interval([2.0] * 5, [1.0] * 5), ratio_interval([2.0] * 4, [1.0] * 5).is_known
    (Interval(low=2.0, high=2.0), False)
    """
    above, below = _checked(numerator), _checked(denominator)
    if min(len(above), len(below)) < MIN_VALUES_FOR_RATIO:
        return UNKNOWN
    generator = np.random.default_rng(seed)
    ratios = _divide(
        _resampled_medians(above, num_resamples, generator), _resampled_medians(below, num_resamples, generator)
    )
    tail = (1 - confidence) / 2
    # "inverted_cdf" takes one of the values; interpolating towards infinity would give not-a-number.
    low = np.quantile(np.where(np.isnan(ratios), 0.0, ratios), tail, method="inverted_cdf")
    high = np.quantile(np.where(np.isnan(ratios), np.inf, ratios), 1 - tail, method="inverted_cdf")
    return Interval(float(low), float(high))


def mann_whitney_p(a: Values, b: Values) -> float:
    """Two-sided p-value of the Mann-Whitney U test: exact for small samples, also with ties, else asymptotic.

    >>> round(mann_whitney_p([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]), 4)
    0.0286
    """
    first, second = _checked(a), _checked(b)
    if math.comb(len(first) + len(second), len(first)) > _MAX_ENUMERATED:
        return float(scipy_stats().mannwhitneyu(first, second).pvalue)
    observed, every_sum = _rank_sums(first, second)
    below, above = float(np.mean(every_sum <= observed)), float(np.mean(every_sum >= observed))
    return min(1.0, 2 * min(below, above))


def mann_whitney_less_p(a: Values, b: Values) -> float:
    """One-sided p-value of the Mann-Whitney U test, of values in `a` that tend to be smaller than those in `b`.

    >>> round(mann_whitney_less_p([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]), 4)
    0.0143
    """
    first, second = _checked(a), _checked(b)
    if math.comb(len(first) + len(second), len(first)) > _MAX_ENUMERATED:
        return float(scipy_stats().mannwhitneyu(first, second, alternative="less").pvalue)
    observed, every_sum = _rank_sums(first, second)
    return float(np.mean(every_sum <= observed))


def _rank_sums(first: NDArray[np.float64], second: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The sum of the ranks of the first values, and that of every way to deal all values to two sides.

    scipy falls back to the asymptotic p where values are tied: 0.047 for [1, 1, 1] against [2, 2, 2], truly 0.1.
    """
    ranks = scipy_stats().rankdata(np.concatenate([first, second]))
    every_sum = np.array([sum(deal) for deal in combinations(ranks.tolist(), len(first))])
    return float(ranks[: len(first)].sum()), every_sum


def olympic_mean(values: Values) -> float:
    """The mean without the smallest and the largest value: one failure may be dropped, two make it infinite.

    >>> olympic_mean([1.0, 2.0, 4.0, float("inf")]), olympic_mean([1.0, 2.0, float("inf"), float("inf")])
    (3.0, inf)
    """
    ordered = np.sort(_checked(values))
    if len(ordered) < 3:
        raise UsageError(f"olympic mean needs three values (values: {len(ordered)}); repeat the run more often")
    return float(np.mean(ordered[1:-1]))


def count_warmup(values: Values) -> int:
    """How many leading values of a series of timings belong to the warm-up.

    The second half of the series is taken as steady. A value is like it when it lies within 5 standard deviations of
    its median (the deviation estimated from the median absolute deviation, and the whole at least 2% of the median).
    The warm-up ends at the first of two values in a row that are like it, and at the half at the latest: an answer of
    half the count says that the series has not settled. Fewer than 10 values show no warm-up.

    >>> count_warmup([9.0, 3.0, 1.0, 1.01, 1.0, 0.99, 1.0, 1.01, 1.0, 0.99])
    2
    """
    series = _checked(values)
    half = len(series) // 2
    centre = float(np.median(series[half:]))
    if len(series) < _MIN_VALUES_FOR_WARMUP or not math.isfinite(centre):
        return 0
    deviation = _NORMAL_MAD * float(np.median(np.abs(series[half:] - centre)))
    is_steady = np.abs(series - centre) <= max(5 * deviation, 0.02 * abs(centre))
    return next((i for i in range(half) if is_steady[i] and is_steady[i + 1]), half)


STATISTICS: dict[Statistic, Callable[[Values], float]] = {
    "median": lambda values: float(np.median(_checked(values))),
    "olympic mean": olympic_mean,
    "maximum": lambda values: float(np.max(_checked(values))),
    "sum": lambda values: float(np.sum(_checked(values))),
}
"""How the statistic that a metric names sums up the values of repeated runs."""


def _checked(values: Values) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise UsageError(f"statistics need a list of values (shape: {array.shape}); measure at least once")
    if np.isnan(array).any():
        raise UsageError("a value is not a number; record a failed run as infinity")
    return array


def _median_rank(count: int, confidence: float) -> int:
    """The largest k such that the k-th smallest and k-th largest values enclose the median; 0 if there is none."""
    return int(scipy_stats().binom.ppf((1 - confidence) / 2, count, 0.5))


def _divide(above: NDArray[np.float64] | np.float64, below: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(above / below)


def _resampled_medians(
    values: NDArray[np.float64], num_resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Medians of bootstrap resamples, drawn without drawing the resamples: constant memory for any number of values.

    A resample of n values is n uniform numbers u, each taking sorted value floor(n u). Its median needs only the
    middle order statistics of the u: U(m) ~ Beta(m, n - m + 1), and, for even n, U(m + 1) given U(m), which is the
    smallest of the n - m numbers that are uniform above it.
    """
    ordered, count = np.sort(values), len(values)
    middle = (count + 1) // 2
    lower = generator.beta(middle, count - middle + 1, num_resamples)
    upper = lower if count % 2 else lower + (1 - lower) * generator.beta(1, count - middle, num_resamples)

    def pick(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        # The product can round up to n itself.
        return ordered[np.minimum((uniform * count).astype(np.int64), count - 1)]

    return (pick(lower) + pick(upper)) / 2


@cache
def scipy_stats() -> Any:
    """scipy.stats, which takes longer to import than all of Weft: a rank that only trains is not to wait for it."""
    return import_module("scipy.stats")
