"""`weft schedule`: the drawing, the document, the refusal."""

import json

import pytest

from tests.command_line import run_weft


def test_a_schedule_is_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    lines = run_weft(capfd, "schedule", "pipeline=2 schedule=zero_bubble(3)").out.splitlines()
    assert lines[:2] == ["stage 0  0 1   0<0w2 1<1w2<2w", "stage 1    0 0<1 1<0w2 2<1w2w"]
    assert "idle 10.0% of the time" in lines[4] and lines[5] == "in flight: 2, 2 micro-batches"


def test_its_actions_are_a_document(capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run_weft(capfd, "schedule", "pipeline=3 schedule=1f1b(4)", "--json").out)
    assert found["in_flight"] == [3, 2, 1] and found["idle_share"] == pytest.approx(2 / 6)
    assert found["stages"][2][1] == {"action": {"kind": "backward", "chunk": 0, "micro": 0}, "begin": 3.0, "end": 5.0}


def test_one_stage_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_weft(capfd, "schedule", "data=2")
    assert outcome.code == 2 and "nothing to draw (data=2); add pipeline=2" in outcome.err
