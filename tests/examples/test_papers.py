"""examples/papers: each example with few ranks and steps; what its files hold, and what must be true of them."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.papers import arrivals, async_against_sync, backup_workers, local_steps, stale_bound
from examples.papers.chart import Panel, Point, Series, draw
from tests.docs.documents import ROOT

PICTURES = ROOT / "docs" / "papers"
NAMES = ("async_against_sync", "backup_workers", "local_steps", "stale_bound")
TINY = ("--seeds", "2", "--epochs", "0.25")
Main = Callable[[Sequence[str]], None]


def run(main: Main, out: Path, *arguments: str) -> dict[str, Any]:
    """The document that the example wrote; beside it there must be a picture."""
    main([*TINY, *arguments, "--out", str(out)])
    (written,) = out.glob("*.json")
    assert ElementTree.parse(written.with_suffix(".svg")).getroot().tag.endswith("svg")
    document: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    for row in document["rows"]:
        assert all(len(values) == 2 for values in row["values"].values()), row
    return document


def middles(document: dict[str, Any], metric: str) -> list[float]:
    return [median(row["values"][metric]) for row in document["rows"]]


def test_more_backup_workers_wait_less(tmp_path: Path) -> None:
    found = run(backup_workers.main, tmp_path, "--ranks", "8", "--values", "0,4")
    first, second = middles(found, "idle_share")
    assert first > second
    assert middles(found, "dropped_gradients")[0] == 0 < middles(found, "dropped_gradients")[1]


def test_a_larger_bound_waits_less(tmp_path: Path) -> None:
    found = run(stale_bound.main, tmp_path, "--ranks", "8", "--values", "0,4")
    first, second = middles(found, "idle_share")
    assert first > second
    assert found["rows"][0]["values"]["time_to_target"] == ["inf", "inf"], "a quarter of an epoch is too short"


def test_asynchronous_workers_wait_for_nobody_and_are_stale(tmp_path: Path) -> None:
    found = run(async_against_sync.main, tmp_path, "--ranks", "4,8")
    assert [row["x"] for row in found["rows"]] == ["4", "8"] * 3
    assert max(middles(found, "idle_share")[2:]) < 0.01 < min(middles(found, "idle_share")[:2])
    stale = middles(found, "staleness")
    assert stale[:2] == [0, 0] and 2 < stale[2] <= 3.5 < stale[3] <= 8


def test_local_steps_send_fewer_bytes(tmp_path: Path) -> None:
    found = run(local_steps.main, tmp_path, "--ranks", "4", "--values", "1,4")
    first, second = middles(found, "wall_clock")
    assert first > second, "the network is slow"
    assert "Local SGD" in (tmp_path / "local_steps.svg").read_text(encoding="utf-8")


def test_the_same_seeds_give_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        run(stale_bound.main, tmp_path / name, "--ranks", "2", "--values", "1")
    assert (tmp_path / "a" / "stale_bound.json").read_bytes() == (tmp_path / "b" / "stale_bound.json").read_bytes()


def test_arrivals_are_those_of_the_law_and_of_the_paper() -> None:
    assert arrivals.ARRIVALS.read_text(encoding="utf-8") == arrivals.lines()
    seconds = [float(line) for line in arrivals.lines().splitlines()[1:]]
    assert sum(second <= 2 for second in seconds) / len(seconds) == pytest.approx(0.8, abs=1e-3)
    assert sum(second <= 4 for second in seconds) / len(seconds) == pytest.approx(0.98, abs=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_kept_results_are_of_these_arrivals_and_have_a_picture(name: str) -> None:
    document = json.loads((PICTURES / f"{name}.json").read_text(encoding="utf-8"))
    assert document["arrivals_sha256"] == hashlib.sha256(arrivals.ARRIVALS.read_bytes()).hexdigest()
    assert document["seeds"] >= 3
    assert (PICTURES / f"{name}.svg").is_file()


def test_what_is_not_finite_is_left_out_of_a_chart() -> None:
    points = (Point(1.0, 0.5, 2.0), Point(math.inf, 3.0, math.inf), Point(2.0, 2.0, math.inf))
    drawn = draw("a < b", [Panel("p", "x", ("0", "1", "2"), (Series("s", points),))])
    assert drawn.count("<circle") == 2 and "inf" not in drawn and "nan" not in drawn
    assert "a &lt; b" in drawn
