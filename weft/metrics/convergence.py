"""The convergence gate: whether a relaxed plan reaches the target with not many more samples than one rank needs.

A test of non-inferiority, one-sided, on samples to target over seeds. The claim to be refuted is that the plan needs
more than (1 + margin) times the samples of the reference:

    samples of the plan / (1 + margin)      tend to be smaller than      samples of the reference

by the Mann-Whitney test, which is exact for few seeds. So the verdict is earned: too few seeds, or seeds that scatter
too much, do not pass. A training that never reached the target counts as infinity.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import UsageError
from weft.metrics.statistics import (
    MIN_VALUES_FOR_RATIO,
    Interval,
    mann_whitney_less_p,
    ratio_interval,
    ratio_of_medians,
    summarise,
)

__all__ = ["LEVEL", "MIN_SEEDS", "Convergence", "check_reference", "judge_convergence"]

LEVEL = 0.05
"""The p-value below which the plan is taken to converge."""

MIN_SEEDS = MIN_VALUES_FOR_RATIO


@dataclass(frozen=True)
class Convergence:
    """The finding of a comparison of samples to target."""

    passed: bool
    samples: tuple[float, ...]  # of the plan, by seed; infinity where the target was not reached
    reference: tuple[float, ...]  # of one rank
    margin: float
    ratio: float  # of the medians: above 1 the plan needs more
    ratio_interval: Interval
    p_value: float  # of a plan that needs more than (1 + margin) times the samples, to look like this
    finding: str


def check_reference(reference: Sequence[float]) -> None:
    """Refuse a target that one rank does not reach itself."""
    if math.isinf(summarise(reference).median):
        raise UsageError("one rank does not reach the target itself; set one that it reaches, or train for longer")


def judge_convergence(samples: Sequence[float], reference: Sequence[float], *, margin: float = 0.5) -> Convergence:
    """The verdict on the samples to target of a plan, against those of one rank.

    >>> judge_convergence([120.0, 110.0, 130.0, 100.0, 110.0], [100.0, 100.0, 110.0, 90.0, 100.0]).finding
    '110 samples to the target, one rank 100: 1.1 times as many (1 to 1.3), shown to be less than 1.5 (p = 0.004)'
    """
    if min(len(samples), len(reference)) < MIN_SEEDS:
        numbers = f"plan: {len(samples)}, reference: {len(reference)}"
        raise UsageError(f"too few seeds to judge convergence ({numbers}); give at least {MIN_SEEDS}")
    check_reference(reference)
    usual = summarise(reference).median
    p_value = mann_whitney_less_p([value / (1 + margin) for value in samples], reference)
    ratio, interval = ratio_of_medians(samples, reference), ratio_interval(samples, reference)
    passed = p_value < LEVEL
    verdict = "shown to be" if passed else "not shown to be"
    found = summarise(samples).median
    times = (
        f"{ratio:.3g} times as many ({interval.low:.3g} to {interval.high:.3g})" if math.isfinite(ratio) else "never"
    )
    finding = (
        f"{_count(found)} samples to the target, one rank {_count(usual)}: {times}, "
        f"{verdict} less than {1 + margin:g} (p = {p_value:.2g})"
    )
    return Convergence(passed, tuple(samples), tuple(reference), margin, ratio, interval, p_value, finding)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "no number of"
