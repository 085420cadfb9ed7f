"""Two runs side by side: what is refused, what is said, and what it rests on."""

import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from weft.errors import ComparisonError
from weft.metrics.comparison import NO_DIFFERENCE
from weft.records.record import RunRecord
from weft.report.comparison import check_comparable, compare_runs, render_comparison

SLOW = [2.0, 2.1, 2.2, 2.3, 2.1, 2.0]
FAST = [1.0, 1.1, 1.0, 1.2, 1.1, 1.0]


def shown(a: RunRecord, b: RunRecord) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_comparison(compare_runs(a, b), "runs/a", "runs/b"), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


TWO_RUNS = """\
compared
  A  runs/a
  B  runs/b

set differently
  setting       A     B
  optimizer.lr  0.01  0.1

measured
  metric                     median         95% interval
  test/accuracy        A     0.9800     0.9800 .. 0.9800
  higher is better     B     0.9800     0.9800 .. 0.9800
  no difference shown  gain   1.000  x    1.000 .. 1.000  p 1

  time_to_target       A      2.100  s    2.000 .. 2.300
  lower is better      B      1.050  s    1.000 .. 1.200
  B is faster          gain   2.000  x    1.818 .. 2.200  p 0.0022

  gain: how many times better B is than A; for a time or a rate, the speed-up

"""


def test_golden_comparison(make_record: Callable[..., RunRecord]) -> None:
    assert shown(make_record(times=SLOW, lr=0.01), make_record(times=FAST, lr=0.1)) == TWO_RUNS


def test_every_line_fits_a_terminal(make_record: Callable[..., RunRecord]) -> None:
    text = shown(make_record(times=SLOW[:3]), make_record(times=[*FAST, math.inf]))
    assert max(map(len, text.splitlines())) <= 80


def test_too_few_values_show_no_difference_and_say_how_many_more(make_record: Callable[..., RunRecord]) -> None:
    a, b = make_record(times=SLOW[:3]), make_record(times=FAST)
    assert {metric.result.verdict for metric in compare_runs(a, b).metrics} == {NO_DIFFERENCE}
    text = shown(a, b)
    assert "(2.000 .. 2.200)" in text
    assert "(min .. max) of fewer than the 6 values that a 95% interval needs" in text
    assert text.count("too few values (A: 3, B: 6); repeat A at least 2 more") == 1


def test_run_that_failed_is_slower_than_one_that_did_not(make_record: Callable[..., RunRecord]) -> None:
    comparison = compare_runs(make_record(times=FAST), make_record(times=[math.inf] * 6))
    verdicts = {metric.name: metric.result.verdict for metric in comparison.metrics}
    assert verdicts == {"test/accuracy": "B is worse", "time_to_target": "B is slower"}
    assert "never  s" in shown(make_record(times=FAST), make_record(times=[math.inf] * 6))


GREEN, RED = "\x1b[32m", "\x1b[31m"


@pytest.mark.parametrize(("times", "codes"), [(FAST, [GREEN]), ([9.0 + t for t in FAST], [RED]), (SLOW, [])])
def test_colour_says_better_or_worse(
    make_record: Callable[..., RunRecord], times: list[float], codes: list[str]
) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", no_color=False)
    comparison = compare_runs(make_record(times=SLOW), make_record(times=times))
    console.print(render_comparison(comparison, "a", "b"), crop=False)
    assert isinstance(console.file, io.StringIO)
    assert [code for code in (GREEN, RED) if code in console.file.getvalue()] == codes


def test_other_fixed_part_is_refused_by_the_first_key_that_differs(make_record: Callable[..., RunRecord]) -> None:
    with pytest.raises(ComparisonError, match=r"different problems \(epochs, A: 4, B: 8\).*--force"):
        check_comparable(make_record(epochs=4), make_record(epochs=8))


def test_other_data_under_one_recipe_are_refused(make_record: Callable[..., RunRecord]) -> None:
    with pytest.raises(ComparisonError, match=r"different data \(checksum, A: aaaa, B: bbbb\).*--force"):
        check_comparable(make_record(checksum="aaaa"), make_record(checksum="bbbb"))


def test_recipe_against_a_measured_loop_is_refused(
    make_record: Callable[..., RunRecord], measured_record: RunRecord
) -> None:
    with pytest.raises(ComparisonError, match=r"different problems \(model, A: mlp, B: -\)"):
        check_comparable(make_record(), measured_record)


def test_mutable_part_may_differ(make_record: Callable[..., RunRecord]) -> None:
    check_comparable(make_record(lr=0.1), make_record(lr=0.2))


def test_runs_without_a_metric_in_common_are_refused(
    make_record: Callable[..., RunRecord], measured_record: RunRecord
) -> None:
    with pytest.raises(
        ComparisonError, match=r"share no metric \(A: test/accuracy, time_to_target; B: train/step_time"
    ):
        compare_runs(make_record(), measured_record)
    with pytest.raises(ComparisonError, match=r"A: none"):
        compare_runs(replace(measured_record, repetitions=()), measured_record)


def test_measured_loops_are_compared_step_by_step(measured_record: RunRecord) -> None:
    (repetition,) = measured_record.repetitions
    slower = replace(repetition, series={"train/step_time": tuple(2 * t for t in repetition.series["train/step_time"])})
    (metric,) = compare_runs(measured_record, replace(measured_record, repetitions=(slower,))).metrics
    assert metric.result.verdict == "B is slower"
    assert metric.result.ratio == pytest.approx(0.5)


def test_fact_without_a_better_and_worse_has_a_ratio_and_no_gain(make_record: Callable[..., RunRecord]) -> None:
    record = make_record(times=[1.0])
    (repetition,) = record.repetitions
    counted = replace(record, repetitions=(replace(repetition, values={"flops_per_sample": 2e6}),))
    text = shown(counted, counted)
    assert "ratio" in text and "is better\n" not in text


def test_other_machine_is_noted(make_record: Callable[..., RunRecord]) -> None:
    text = shown(make_record(), make_record(machine={"cpu": "Acme 10", "cores": 2, "torch_threads": 2}))
    assert "made on different machines (cpu, A: Acme 9, B: Acme 10)" in text
