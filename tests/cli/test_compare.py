"""`weft compare`: a verdict on two run folders, or a refusal."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def other_run(weft: Any, tiny: tuple[str, ...]) -> Path:
    """A run of another fixed part."""
    weft("run", *tiny, "--set", "epochs=0.25", "--out", "other", "--quiet")
    return Path("other")


def test_run_against_itself_shows_no_difference(weft: Any, finished_run: Path) -> None:
    outcome = weft("compare", finished_run, finished_run)
    assert (outcome.code, outcome.err) == (0, "")
    assert "no difference shown" in outcome.out
    assert not any(line.startswith("  B is") for line in outcome.out.splitlines())
    assert "too few values (A: 2, B: 2); repeat A at least 3 more and B at least 3 more" in outcome.out


def test_json_holds_every_metric_with_its_verdict(weft: Any, finished_run: Path) -> None:
    document = weft("compare", finished_run, finished_run, "--json").json
    metrics = {metric["name"]: metric["result"] for metric in document["comparison"]["metrics"]}
    assert {"test/accuracy", "wall_clock", "throughput"} <= metrics.keys()
    assert {result["verdict"] for result in metrics.values()} == {"no difference shown"}
    assert metrics["wall_clock"]["a"]["count"] == 2


def test_other_problem_is_refused_unless_forced(weft: Any, finished_run: Path, other_run: Path) -> None:
    refused = weft("compare", finished_run, other_run)
    assert (refused.code, refused.out) == (2, "")
    assert "runs are of different problems (epochs, A: 0.5, B: 0.25)" in refused.err
    forced = weft("compare", finished_run, other_run, "--force")
    assert forced.code == 0 and "set differently" in forced.out


def test_run_that_is_not_there_is_2(weft: Any, finished_run: Path) -> None:
    assert weft("compare", finished_run, "absent").code == 2
