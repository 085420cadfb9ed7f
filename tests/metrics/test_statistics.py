"""Statistics of repeated values."""

import math
import statistics as standard

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from weft.errors import UsageError
from weft.metrics.statistics import (
    STATISTICS,
    UNKNOWN,
    Interval,
    count_warmup,
    mann_whitney_p,
    median_interval,
    olympic_mean,
    ratio_interval,
    ratio_of_medians,
    repetitions_needed,
    summarise,
)

INF = math.inf
runs = st.lists(st.one_of(st.floats(0.01, 100), st.just(INF)), min_size=1, max_size=30)


@pytest.mark.parametrize("count", [6, 7, 8, 9, 17, 50, 101])
def test_median_interval_has_the_largest_rank_that_still_covers(count: int) -> None:
    values = np.arange(1.0, count + 1)
    rank = int(median_interval(values).low)

    def missed(k: int) -> float:
        return float(2 * sum(math.comb(count, i) for i in range(k)) / 2**count)

    assert missed(rank) <= 0.05 < missed(rank + 1)
    assert median_interval(values).high == count + 1 - rank


def test_median_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    samples = generator.lognormal(0.0, 1.0, (2000, 12))
    hits = sum(1.0 in median_interval(sample) for sample in samples)
    assert 0.95 <= hits / 2000 <= 0.98  # 12 values: exactly 0.961


def test_fewer_than_six_values_have_no_interval_at_95_percent() -> None:
    assert median_interval([1.0] * 5) == UNKNOWN
    assert median_interval([1.0] * 6) == Interval(1.0, 1.0)
    assert median_interval([1.0] * 5, confidence=0.9).is_known


@given(runs)
@settings(max_examples=50, deadline=None)
def test_interval_holds_the_median_with_failures_among_the_values(values: list[float]) -> None:
    summary = summarise(values)
    assert summary.median in summary.interval
    assert summary.interval.low <= summary.interval.high


def test_failures_count_as_infinity() -> None:
    summary = summarise([1.0, 2.0, INF, INF, INF, INF, INF])
    assert summary.median == INF
    assert summary.interval == Interval(1.0, INF)
    assert summarise([INF] * 6).interval.width == 0


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [[1.0]]])
def test_values_without_a_rank_are_refused(values: list[float]) -> None:
    with pytest.raises(UsageError):
        summarise(values)


def test_interval_in_words() -> None:
    assert str(Interval(0.91234, 1.0)) == "0.9123 to 1"
    assert str(UNKNOWN) == "unknown"


def test_is_within_measures_the_whole_width() -> None:
    summary = summarise([0.98, 1.0, 1.0, 1.0, 1.0, 1.02])
    assert summary.is_within(0.041)
    assert not summary.is_within(0.039)
    assert not summarise([1.0] * 5).is_within(0.5)


def test_repetitions_needed_grow_with_the_square_of_the_width() -> None:
    narrow, wide = [1.0] * 5 + [1.125], [1.0] * 5 + [1.25]
    assert repetitions_needed(narrow, relative_width=1 / 16) == 6 * 2**2 - 6
    assert repetitions_needed(wide, relative_width=1 / 16) == 6 * 4**2 - 6


def test_repetitions_needed_at_the_edges() -> None:
    assert repetitions_needed([1.0]) == 5
    assert repetitions_needed([1.0] * 6) == 0
    assert repetitions_needed([1.0] * 5 + [INF]) == 6
    assert repetitions_needed([0.0] * 5 + [1.0]) == 6


def test_resampled_medians_are_those_of_real_resamples() -> None:
    # The shortcut draws order statistics; here every resample of 5 and of 6 values is drawn in full.
    generator = np.random.default_rng(1)
    for count in (5, 6):
        values = np.arange(1.0, count + 1) ** 2
        real = np.median(generator.choice(values, (100_000, count)), axis=1)
        interval = ratio_interval(values, [1.0] * 5, num_resamples=100_000)
        assert interval == Interval(*np.quantile(real, [0.025, 0.975], method="inverted_cdf"))
        half = ratio_interval(values, [1.0] * 5, confidence=0.5, num_resamples=100_000)
        assert half == Interval(*np.quantile(real, [0.25, 0.75], method="inverted_cdf"))


def test_ratio_interval_is_reproducible_and_holds_the_ratio() -> None:
    generator = np.random.default_rng(0)
    above, below = generator.lognormal(0.7, 0.1, 40), generator.lognormal(0.0, 0.1, 31)
    interval = ratio_interval(above, below)
    assert interval == ratio_interval(above, below) != ratio_interval(above, below, seed=1)
    assert ratio_of_medians(above, below) in interval
    assert 1.8 < interval.low < interval.high < 2.2


def test_ratio_interval_with_failures() -> None:
    good, bad = [1.0] * 8, [INF] * 8
    assert ratio_interval(good, bad) == Interval(0.0, 0.0)
    assert ratio_interval(bad, good) == Interval(INF, INF)
    assert ratio_interval(bad, bad) == Interval(0.0, INF)
    assert math.isnan(ratio_of_medians(bad, bad))
    assert ratio_interval([1.0] * 6 + [INF] * 5, [1.0] * 11) == Interval(1.0, INF)


def test_ratio_interval_scales_to_many_values() -> None:
    many = np.random.default_rng(0).lognormal(0.0, 0.5, 200_000)
    interval = ratio_interval(many, many)
    assert 1.0 in interval
    assert interval.width < 0.02


def test_mann_whitney_is_exact_with_ties() -> None:
    a, b = [1.0, 2.0, 2.0, 3.0, INF], [2.0, 3.0, 3.0, 4.0, INF, INF]
    every_deal = stats.PermutationMethod(n_resamples=1000)
    assert mann_whitney_p(a, b) == pytest.approx(stats.mannwhitneyu(a, b, method=every_deal).pvalue)


def test_mann_whitney_equals_scipy_without_ties() -> None:
    values = np.random.default_rng(0).permutation(60).astype(float)
    for cut, end in ((1, 5), (4, 9), (8, 16), (8, 60), (30, 60)):
        expected = stats.mannwhitneyu(values[:cut], values[cut:end]).pvalue
        assert mann_whitney_p(values[:cut], values[cut:end]) == pytest.approx(expected)


def test_mann_whitney_of_few_tied_values_shows_nothing() -> None:
    # The asymptotic p-value of these six values is 0.047, which no six values can truly reach.
    assert mann_whitney_p([1.0] * 3, [INF] * 3) == pytest.approx(0.1)


def test_mann_whitney_of_equal_values_is_one() -> None:
    assert mann_whitney_p([2.0] * 4, [2.0] * 9) == 1.0
    assert mann_whitney_p([INF] * 4, [INF] * 4) == 1.0


@given(runs, runs)
@settings(max_examples=25, deadline=None)
def test_mann_whitney_is_a_symmetric_probability(a: list[float], b: list[float]) -> None:
    p_value = mann_whitney_p(a, b)
    assert 0 <= p_value <= 1
    assert p_value == pytest.approx(mann_whitney_p(b, a))


def test_mann_whitney_sees_a_shift_in_many_values() -> None:
    values = np.random.default_rng(0).normal(10.0, 1.0, 200)
    assert mann_whitney_p(values, values + 1) < 1e-6


def test_olympic_mean_drops_one_failure_and_not_two() -> None:
    assert olympic_mean([3.0, 1.0, 2.0, INF]) == 2.5
    assert olympic_mean([3.0, 1.0, INF, INF]) == INF
    assert olympic_mean([5.0, 7.0, 100.0]) == 7.0
    with pytest.raises(UsageError, match="three values"):
        olympic_mean([1.0, 2.0])


@given(st.lists(st.floats(0.0, 1e6), min_size=3, max_size=20))
@settings(max_examples=50, deadline=None)
def test_averages_divide_by_the_number_of_values(values: list[float]) -> None:
    # Deep500's avg_loss divided by n + 1, so that the first value counted half.
    assert olympic_mean(values) == pytest.approx(standard.fmean(sorted(values)[1:-1]))


def test_every_statistic_a_metric_may_name_is_there() -> None:
    values = [4.0, 1.0, 2.0, 3.0]
    assert {name: statistic(values) for name, statistic in STATISTICS.items()} == {
        "median": 2.5,
        "olympic mean": 2.5,
        "maximum": 4.0,
        "sum": 10.0,
    }


def test_warmup_ends_where_values_become_steady() -> None:
    noise = np.random.default_rng(0).lognormal(0.0, 0.03, 60)
    assert count_warmup([30.0, 5.0, 2.0, *noise]) == 3
    assert count_warmup([0.2, 0.3, *noise]) == 2  # a start that is too fast, before the processor slows down
    assert count_warmup(noise) == 0


def test_warmup_of_a_series_that_has_not_settled_is_its_half() -> None:
    assert count_warmup([2.0**-i for i in range(20)]) == 10
    assert count_warmup([100.0] * 10 + [1.0] * 10) == 10


def test_one_outlier_is_no_warmup_and_few_values_show_none() -> None:
    assert count_warmup([1.0, 1.0, 50.0] + [1.0] * 17) == 0
    assert count_warmup([1.0, 50.0] + [1.0] * 18) == 2
    assert count_warmup([50.0] + [1.0] * 8) == 0
    assert count_warmup([INF] * 12) == 0
