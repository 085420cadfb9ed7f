"""The result of a run, as it is seen on a terminal of 80 columns."""

import io
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from weft.records.record import Repetition, RunRecord, Status, Verdict
from weft.report.summary import render_run, verdict_lines


def shown(record: RunRecord, *, details: bool = False, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=80, color_system=None).print(render_run(record, details=details), crop=False)
    stream.seek(0)
    return stream.read()


ONE = """\
tiny
  done, target reached (accuracy >= 0.97): seed 0

measured
  metric           value    unit  better
  test/accuracy   0.9800          higher
  time_to_target   2.500    s     lower
  one value; a 95% interval of the median needs at least 6

over 4 epochs, seed 0
  train/loss           █▃▁        2  to  0.5000
  validation/loss      █▃▁▁       2  to  0.5000
  validation/accuracy  ▁▆██  0.5000  to  0.8750

accepted
  PASS  test/accuracy >= 0.97  0.9800

"""

THREE = """\
measured
  metric          median        (min .. max)  unit  better
  test/accuracy   0.9800  (0.9700 .. 0.9900)        higher
  time_to_target   250.0  (200.0 .. 1,300.0)  ms    lower
  3 values; a 95% interval of the median needs at least 6
"""

EIGHT = """\
tiny
  done, target reached (accuracy >= 0.97): seeds 0, 1, 2, 3, 4, 5, 6
  failed, loss is not finite (step: 3): seed 7

measured
  metric          median      95% interval  unit  better
  test/accuracy   0.9800  failed .. 0.9800        higher
  time_to_target   4.500    1.000 .. never  s     lower

"""


def test_one_repetition(make_record: Callable[..., RunRecord]) -> None:
    assert shown(make_record(verdicts=(Verdict("test/accuracy >= 0.97", 0.98, True),))) == ONE


def test_three_repetitions_show_their_range_and_say_why(make_record: Callable[..., RunRecord]) -> None:
    text = shown(make_record(times=[0.25, 1.3, 0.2], accuracies=[0.98, 0.97, 0.99]))
    assert "done, target reached (accuracy >= 0.97): seeds 0, 1, 2\n" in text
    assert THREE in text


def test_eight_repetitions_have_an_interval_that_a_failure_widens(make_record: Callable[..., RunRecord]) -> None:
    assert shown(make_record(times=[1, 2, 3, 4, 5, 6, 7, math.inf])).startswith(EIGHT)


def test_rule_that_failed_is_told(make_record: Callable[..., RunRecord]) -> None:
    verdicts = (Verdict("test/accuracy >= 0.97", 0.98, True), Verdict("time_to_target <= 2", math.inf, False))
    expected = "not accepted\n  PASS  test/accuracy >= 0.97  0.9800\n  FAIL  time_to_target <= 2     never\n"
    assert expected in shown(make_record(verdicts=verdicts))


def test_verdicts_alone_are_coloured() -> None:
    passed, failed = verdict_lines([Verdict("test/accuracy >= 0.9", 1.0, True), Verdict("test/loss <= 1", 2.0, False)])
    assert [str(span.style) for line in (passed, failed) for span in line.spans if span.style] == ["green", "bold red"]


def test_value_of_a_rule_has_no_prefix_so_that_it_can_be_held_against_the_bound() -> None:
    (line,) = verdict_lines([Verdict("time_to_target <= 0.05", 0.02, True)])
    assert line.plain == "PASS  time_to_target <= 0.05  0.02000"


@pytest.mark.parametrize("status", ["running", "interrupted"])
def test_run_that_has_not_ended_shows_what_there_is(make_record: Callable[..., RunRecord], status: Status) -> None:
    repetition = Repetition(3, status, "", "")
    assert shown(replace(make_record(), repetitions=(repetition,))) == f"tiny\n  {status}: seed 3\n\n"


def test_details_say_how_it_was_made(make_record: Callable[..., RunRecord]) -> None:
    record = make_record()
    assert "made with" not in shown(record)
    text = shown(record, details=True)
    assert "\nmade with\n  fixed       model=mlp  model.hidden=64,32  epochs=4" in text
    assert max(map(len, text.splitlines())) <= 80


def test_terminal_that_knows_ascii_only_is_served(make_record: Callable[..., RunRecord]) -> None:
    assert shown(make_record(), encoding="ascii").isascii()


def test_curves_are_those_of_the_first_repetition_that_has_any(make_record: Callable[..., RunRecord]) -> None:
    assert "over 4 epochs, seed 1" in shown(make_record(times=[math.inf, 2.0]))


def test_measured_loop(measured_record: RunRecord) -> None:
    text = shown(measured_record)
    assert "  train/step_time   10.10  10.00 .. 10.20  ms    lower\n" in text
