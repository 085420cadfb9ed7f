"""The convergence gate: passes what is shown to be within the margin, and nothing else."""

import math

import numpy as np
import pytest
from scipy import stats

from weft.errors import UsageError
from weft.metrics.convergence import LEVEL, judge_convergence, judge_quality
from weft.metrics.statistics import mann_whitney_less_p

REFERENCE = [100.0, 100.0, 110.0, 90.0, 100.0]


def test_a_plan_as_good_as_one_rank_passes() -> None:
    verdict = judge_convergence(REFERENCE, REFERENCE)
    assert verdict.passed and verdict.ratio == 1.0 and verdict.p_value < 0.01
    assert verdict.finding.startswith("100 samples to the target, one rank 100: 1 times as many")


@pytest.mark.parametrize("factor", [1.6, 3.0, math.inf])
def test_a_plan_beyond_the_margin_fails(factor: float) -> None:
    verdict = judge_convergence([factor * value for value in REFERENCE], REFERENCE)
    assert not verdict.passed and "not shown to be less than 1.5" in verdict.finding


def test_what_is_not_shown_does_not_pass() -> None:
    """The median is well within the margin, and the seeds scatter so much that it proves nothing."""
    verdict = judge_convergence([60.0, 400.0, 120.0, 500.0, 90.0], REFERENCE)
    assert verdict.ratio < 1.5 and not verdict.passed


def test_the_margin_decides() -> None:
    samples = [1.4 * value for value in REFERENCE]
    assert judge_convergence(samples, REFERENCE, margin=1.0).passed
    assert not judge_convergence(samples, REFERENCE, margin=0.2).passed


def test_of_five_seeds_none_may_fail_and_of_eight_one_may() -> None:
    assert not judge_convergence([*REFERENCE[:4], math.inf], REFERENCE, margin=1.0).passed
    eight = [*REFERENCE, *REFERENCE[:3]]
    assert judge_convergence([*eight[:7], math.inf], eight, margin=1.0).passed
    assert not judge_convergence([*eight[:4], *[math.inf] * 4], eight, margin=1.0).passed


def test_a_plan_that_never_arrives_says_so() -> None:
    verdict = judge_convergence([math.inf] * 5, REFERENCE)
    assert "no number of samples to the target" in verdict.finding and verdict.p_value == pytest.approx(1.0)


def test_a_reference_that_never_arrives_judges_nothing() -> None:
    with pytest.raises(UsageError, match="one rank does not reach the target itself"):
        judge_convergence(REFERENCE, [math.inf] * 5)


@pytest.mark.parametrize(("samples", "reference"), [(REFERENCE[:4], REFERENCE), (REFERENCE, REFERENCE[:4])])
def test_too_few_seeds_are_refused(samples: list[float], reference: list[float]) -> None:
    with pytest.raises(UsageError, match="too few seeds"):
        judge_convergence(samples, reference)


def test_a_plan_at_the_margin_passes_as_seldom_as_the_level_says() -> None:
    """The size of the test: plans that are just at the margin, over many experiments of five seeds."""
    generator = np.random.default_rng(0)
    values = np.exp(generator.normal(0.0, 0.3, (400, 10))) * 1000
    passed = [mann_whitney_less_p(row[:5], row[5:]) < LEVEL for row in values]
    assert np.mean(passed) < LEVEL + 0.025


def test_one_sided_p_equals_scipy_without_ties_and_is_exact_with_them() -> None:
    a, b = [1.0, 4.0, 2.0, 9.0], [3.0, 8.0, 7.0, 11.0, 5.0]
    assert mann_whitney_less_p(a, b) == pytest.approx(
        stats.mannwhitneyu(a, b, alternative="less", method="exact").pvalue
    )
    assert mann_whitney_less_p([1.0] * 3, [2.0] * 3) == pytest.approx(1 / 20)
    assert mann_whitney_less_p(list(range(12)), list(range(20, 32))) < 1e-4  # too many deals to try each


SCORES = [0.99, 0.98, 0.985, 0.99, 0.98]


@pytest.mark.parametrize(("loss", "passes"), [(-0.01, True), (0.0, True), (0.002, True), (0.01, False), (0.05, False)])
def test_scores_pass_that_are_shown_to_be_within_the_margin(loss: float, passes: bool) -> None:
    found = judge_quality([score - loss for score in SCORES], SCORES, margin=0.01)
    assert found.passed == passes and found.difference == pytest.approx(-loss)
    assert found.interval.is_known and found.median == pytest.approx(0.985 - loss)


def test_scores_that_scatter_too_much_are_not_shown_to_be_as_good() -> None:
    assert not judge_quality([0.99, 0.9, 0.985, 0.99, 0.91], SCORES, margin=0.01).passed


@pytest.mark.parametrize("scores", [SCORES[:4], [*SCORES, 0.98]])
def test_scores_are_of_the_same_seeds_and_enough(scores: list[float]) -> None:
    with pytest.raises(UsageError, match="seeds do not match or are too few"):
        judge_quality(scores, SCORES, margin=0.01)
