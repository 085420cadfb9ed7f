"""Every number is a statistic over repetitions, with an interval where there are values enough for one."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.records.record import RunRecord
from weft.report.quantity import scale_of
from weft.report.rows import Spread, format_spread, measured_values, metric_of, metric_rows, row_of


def test_six_values_have_an_interval_and_five_have_a_range() -> None:
    six, five = row_of("time_to_target", [4, 1, 3, 2, 6, 5]), row_of("time_to_target", [4, 1, 3, 2, 5])
    assert (six.value, six.spread) == (3.5, Spread(6, 1, 6, is_interval=True))
    assert (five.value, five.spread) == (3, Spread(5, 1, 5, is_interval=False))


def test_metric_names_its_own_statistic() -> None:
    row = row_of("peak_process_memory", [1e6, 3e6, 2e6])
    assert (row.statistic, row.value) == ("maximum", 3e6)
    assert row.spread == Spread(3, 1e6, 3e6, is_interval=False)


@pytest.mark.parametrize("failure", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("name", "worst"), [("test/accuracy", -math.inf), ("time_to_target", math.inf)])
def test_failure_counts_as_the_worst_value_whatever_its_sign(name: str, worst: float, failure: float) -> None:
    assert row_of(name, [1.0, failure, failure]).value == worst


def test_failed_repetition_counts_though_it_has_no_values(make_record: Callable[..., RunRecord]) -> None:
    record = make_record(times=[2.0, math.inf, math.inf])
    assert measured_values(record) == {
        "test/accuracy": [0.98, math.inf, math.inf],
        "time_to_target": [2.0, math.inf, math.inf],
    }
    assert [row.value for row in metric_rows(record)] == [-math.inf, math.inf]


def test_fact_that_has_no_better_and_worse_cannot_fail(make_record: Callable[..., RunRecord]) -> None:
    record = make_record(times=[2.0, math.inf])
    first = replace(record.repetitions[0], values={"flops_per_sample": 100.0})
    assert measured_values(replace(record, repetitions=(first, record.repetitions[1]))) == {"flops_per_sample": [100.0]}


def test_measured_loop_counts_its_steps_without_the_warm_up(measured_record: RunRecord) -> None:
    (row,) = metric_rows(measured_record)
    assert (row.name, row.spread.count, row.spread.is_interval) == ("train/step_time", 12, True)
    assert 0.010 <= row.value <= 0.0102


def test_series_of_a_recipe_are_no_repetitions(make_record: Callable[..., RunRecord]) -> None:
    assert "train/loss" not in measured_values(make_record())


def test_name_that_nobody_knows_is_a_plain_number() -> None:
    assert metric_of("my/thing").direction == "neither"
    assert row_of("my/thing", [3.0]).metric.unit == ""


def test_spread_of_one_value_or_of_failures_alone_is_empty() -> None:
    metric, scale = metric_of("time_to_target"), scale_of([1.0], "s")
    assert format_spread(Spread(1, 2.0, 2.0, False), metric, scale) == ""
    assert format_spread(Spread(3, math.inf, math.inf, False), metric, scale) == ""
    assert format_spread(Spread(3, 2.0, math.inf, False), metric, scale) == "(2 .. never)"
    assert format_spread(Spread(6, 2.0, 3.0, True), metric, scale) == "2 .. 3"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_median_lies_within_its_spread(values: list[float]) -> None:
    row = row_of("wall_clock", values)
    assert row.spread.low <= row.value <= row.spread.high
    assert row.spread.count == len(values)
