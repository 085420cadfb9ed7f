"""The record in memory: what is accepted, and which values it gives."""

import math

import pytest

from weft.records.record import Repetition, RunRecord, Verdict


def record_with(*repetitions: Repetition, verdicts: tuple[Verdict, ...] = ()) -> RunRecord:
    return RunRecord("tiny", {}, "", "", "", {}, {}, {}, repetitions, verdicts)


@pytest.mark.parametrize(("passed", "accepted"), [((), True), ((True, True), True), ((True, False), False)])
def test_a_run_is_accepted_when_every_rule_passed(passed: tuple[bool, ...], accepted: bool) -> None:
    verdicts = tuple(Verdict("test/loss <= 1", 0.5, each) for each in passed)
    assert record_with(verdicts=verdicts).accepted is accepted


def test_values_come_from_the_repetitions_that_have_one() -> None:
    record = record_with(
        Repetition(0, "done", "", "", values={"loss": 1.0, "wall_clock": 3.0}),
        Repetition(1, "interrupted", "", ""),
        Repetition(2, "failed", "", "", values={"loss": math.inf}),
    )
    assert record.values_of("loss") == [1.0, math.inf]
    assert record.values_of("wall_clock") == [3.0]
    assert record.values_of("accuracy") == []


def test_repetitions_share_no_containers() -> None:
    # A default made once, when the class was, leaked values from one Deep500 metric into the next.
    first, second = Repetition(0, "done", "", ""), Repetition(1, "done", "", "")
    first.values["loss"] = 1.0
    assert second.values == {}
