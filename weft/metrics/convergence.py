"""The convergence gate: whether a plan reaches the target with few more samples, and ends little worse, than one rank.

A test of non-inferiority, one-sided, on samples to target over seeds. The claim to be refuted is that the plan needs
more than (1 + margin) times the samples of the reference:

    samples of the plan / (1 + margin)      tend to be smaller than      samples of the reference

by the Mann-Whitney test, which is exact for few seeds. So the verdict is earned: too few seeds, or seeds that scatter
too much, do not pass. A training that never reached the target counts as infinity.

Of scores in the end the claim to be refuted is that they are worse than those of the reference by a margin:

    scores of the reference - margin        tend to be smaller than      scores of the plan
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import UsageError
from weft.metrics.statistics import (
    MIN_VALUES_FOR_RATIO,
    Interval,
    mann_whitney_less_p,
    median_interval,
    ratio_interval,
    ratio_of_medians,
    summarise,
)

__all__ = ["LEVEL", "MIN_SEEDS", "Convergence", "Quality", "check_reference", "judge_convergence", "judge_quality"]

LEVEL = 0.05
"""The p-value below which the plan is taken to converge."""

MIN_SEEDS = MIN_VALUES_FOR_RATIO

SCORE_CONFIDENCE = 0.93
"""Of intervals of scores: the range of five seeds is one of 93.75%, and there is none of 95%."""


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


@dataclass(frozen=True)
class Quality:
    """The finding of a comparison of scores of which more is better."""

    passed: bool
    median: float
    interval: Interval  # of the median, 93%
    difference: float  # to the reference, seed by seed: their median
    difference_interval: Interval
    margin: float
    p_value: float  # of scores that are worse by the margin, to look like this


def judge_quality(scores: Sequence[float], reference: Sequence[float], *, margin: float) -> Quality:
    """The verdict on the scores of a plan, by seed, against those of the same seeds of the reference.

    >>> judge_quality([0.90, 0.91, 0.92, 0.90, 0.91], [0.91, 0.91, 0.92, 0.91, 0.90], margin=0.02).passed
    True
    >>> judge_quality([0.86, 0.91, 0.87, 0.90, 0.88], [0.91, 0.91, 0.92, 0.91, 0.90], margin=0.02).passed
    False
    """
    if len(scores) != len(reference) or len(scores) < MIN_SEEDS:
        numbers = f"plan: {len(scores)}, reference: {len(reference)}"
        raise UsageError(f"seeds do not match or are too few ({numbers}); give both the same, at least {MIN_SEEDS}")
    p_value = mann_whitney_less_p([value - margin for value in reference], scores)
    differences = [score - usual for score, usual in zip(scores, reference, strict=True)]
    return Quality(
        passed=p_value < LEVEL,
        median=summarise(scores).median,
        interval=median_interval(scores, SCORE_CONFIDENCE),
        difference=summarise(differences).median,
        difference_interval=median_interval(differences, SCORE_CONFIDENCE),
        margin=margin,
        p_value=p_value,
    )


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "no number of"
