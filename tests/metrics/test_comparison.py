"""Comparisons and their verdicts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ComparisonError
from weft.metrics.comparison import NO_DIFFERENCE, compare, compare_pairs
from weft.metrics.metric import METRICS, Metric
from weft.metrics.statistics import Interval

INF = math.inf
TIME, ACCURACY, LOSS, RATE = METRICS["step_time"], METRICS["accuracy"], METRICS["loss"], METRICS["throughput"]
SMALL, LARGE = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 2.1, 2.2, 2.3, 2.4, 2.5]


@pytest.mark.parametrize(
    ("metric", "verdict", "reverse"),
    [
        (TIME, "B is slower", "B is faster"),
        (RATE, "B is faster", "B is slower"),
        (LOSS, "B is worse", "B is better"),
        (ACCURACY, "B is better", "B is worse"),
        (METRICS["flops_per_sample"], "B is larger", "B is smaller"),
    ],
)
def test_verdict_follows_the_direction_of_the_metric(metric: Metric, verdict: str, reverse: str) -> None:
    assert compare(SMALL, LARGE, metric).verdict == verdict
    assert compare(LARGE, SMALL, metric).verdict == reverse


def test_ratio_above_one_means_that_b_is_better() -> None:
    faster = compare(LARGE, SMALL, TIME)
    assert faster.ratio == pytest.approx(2.25 / 1.25)
    assert faster.ratio_interval.low > 1
    assert compare(SMALL, LARGE, ACCURACY).ratio == pytest.approx(2.25 / 1.25)
    assert compare(LARGE, SMALL, ACCURACY).ratio == pytest.approx(1.25 / 2.25)


def test_comparison_holds_both_summaries_and_the_p_value() -> None:
    result = compare(SMALL, LARGE, TIME)
    assert (result.a.count, result.a.median, result.a.interval) == (6, 1.25, Interval(1.0, 1.5))
    assert (result.b.count, result.b.median, result.b.interval) == (6, 2.25, Interval(2.0, 2.5))
    assert result.p_value == pytest.approx(2 / math.comb(12, 6))
    assert result.is_shown
    assert result.reason == "the values differ (p = 0.0022)"


def test_equal_values_show_no_difference() -> None:
    result = compare(SMALL, SMALL, TIME)
    assert (result.verdict, result.ratio, result.is_shown) == (NO_DIFFERENCE, 1.0, False)
    assert result.reason == "the values overlap (p = 1)"


def test_chance_alone_seldom_shows_a_difference() -> None:
    generator = np.random.default_rng(0)
    trials = generator.lognormal(0.0, 0.2, (200, 2, 7)).tolist()
    shown = sum(compare(a, b, TIME).is_shown for a, b in trials)
    assert shown <= 0.05 * 200


@pytest.mark.parametrize(
    ("num_a", "num_b", "cure"),
    [
        (1, 1, "repeat A at least 4 more and B at least 4 more"),
        (4, 9, "repeat A at least 1 more"),
        (5, 3, "repeat B at least 2 more"),
    ],
)
def test_too_few_values_show_nothing_and_say_how_many_are_missing(num_a: int, num_b: int, cure: str) -> None:
    result = compare([1.0] * num_a, [100.0] * num_b, TIME)
    assert result.verdict == NO_DIFFERENCE
    assert result.reason == f"too few values (A: {num_a}, B: {num_b}); {cure}"
    assert not result.ratio_interval.is_known


def test_five_values_that_do_not_overlap_are_enough() -> None:
    assert compare(SMALL[:5], LARGE[:5], TIME).verdict == "B is slower"


def test_ranks_that_differ_without_the_medians_show_nothing() -> None:
    a = [1.0] * 10 + [1.5] * 9
    b = [1.0] * 10 + [0.5] * 9
    result = compare(a, b, TIME)
    assert result.p_value < 0.05
    assert result.verdict == NO_DIFFERENCE
    assert result.reason == f"the interval of the ratio holds 1 ({result.ratio_interval})"


@pytest.mark.parametrize("failure", [INF, -INF, math.nan])
@pytest.mark.parametrize("metric", [TIME, ACCURACY])
def test_a_failure_is_the_worst_value_whatever_the_direction(metric: Metric, failure: float) -> None:
    result = compare(SMALL, [failure] * 6, metric)
    assert result.verdict in ("B is slower", "B is worse")
    assert (result.ratio, result.ratio_interval) == (0.0, Interval(0.0, 0.0))
    assert compare([failure] * 6, SMALL, metric).ratio == INF
    assert compare(SMALL, [*SMALL[:5], failure], metric).verdict == NO_DIFFERENCE


def test_two_that_failed_are_not_told_apart() -> None:
    result = compare([INF] * 6, [INF] * 6, TIME)
    assert (result.verdict, result.reason, result.p_value) == (NO_DIFFERENCE, "both failed", 1.0)
    assert math.isnan(result.ratio)


def test_negative_values_have_a_verdict_and_no_ratio() -> None:
    result = compare([-value for value in SMALL], [-value for value in LARGE], LOSS)
    assert result.verdict == "B is better"
    assert math.isnan(result.ratio)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ComparisonError, match="nothing to compare"):
        compare([], SMALL, TIME)


def test_pairs_cancel_what_both_sides_share() -> None:
    drift = np.linspace(1.0, 10.0, 12)
    result = compare_pairs(list(1.1 * drift), list(drift), TIME)
    assert result.verdict == "B is faster"
    assert result.ratio == pytest.approx(1.1)
    assert compare(list(1.1 * drift), list(drift), TIME).verdict == NO_DIFFERENCE


def test_pairs_need_six_and_an_interval_without_one() -> None:
    assert compare_pairs([2.0] * 5, [1.0] * 5, TIME).reason == "too few pairs (pairs: 5); measure more"
    assert compare_pairs([2.0] * 6, [1.0] * 6, TIME).verdict == "B is faster"
    assert compare_pairs([2.0] * 6, [1.0] * 6, RATE).verdict == "B is slower"
    assert compare_pairs([2.0, 1.0] * 6, [1.0, 2.0] * 6, TIME).verdict == NO_DIFFERENCE


def test_pairs_with_failures() -> None:
    assert compare_pairs([INF] * 6, [1.0] * 6, TIME).ratio == INF
    assert compare_pairs([1.0] * 6, [INF] * 6, TIME).verdict == "B is slower"
    assert compare_pairs([INF] * 6, [INF] * 6, TIME).ratio == 1.0


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([-1.0], [1.0])])
def test_pairs_that_are_none_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ComparisonError):
        compare_pairs(a, b, TIME)


values = st.lists(st.one_of(st.floats(0.001, 1000), st.just(INF)), min_size=1, max_size=9)


@given(values, values, st.sampled_from([TIME, ACCURACY]))
@settings(max_examples=40, deadline=None)
def test_swapping_the_sides_swaps_the_verdict(a: list[float], b: list[float], metric: Metric) -> None:
    one, other = compare(a, b, metric), compare(b, a, metric)
    opposite = {"B is faster": "B is slower", "B is better": "B is worse", NO_DIFFERENCE: NO_DIFFERENCE}
    opposite |= {after: before for before, after in opposite.items()}
    # The two bootstraps differ by their draws; a verdict on the very edge may.
    if not any(math.isclose(edge, 1.0, rel_tol=0.05) for edge in (one.ratio_interval.low, one.ratio_interval.high)):
        assert other.verdict == opposite[one.verdict]
    assert one.ratio in one.ratio_interval or math.isnan(one.ratio)
