"""The examples: one as a user runs it, in a process of its own; the others in the process of the tests."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import run_weft
from tests.docs.documents import ROOT
from weft.records.record_file import read_record

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What an example prints, run in an empty folder; warnings are errors, as in all tests."""
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> str:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested() -> None:
    files = (Path(__file__), ROOT / "tests" / "examples" / "test_train.py")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert [example.name for example in EXAMPLES.glob("*.py") if f'"{example.name}"' not in text] == []


def test_own_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    path = (EXAMPLES / "own_recipe.py").relative_to(ROOT)
    outcome = run_weft(capsys, "run", f"{path}:recipe", "--quiet", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "PASS  test/accuracy >= 0.97" in outcome.out
    assert read_record(tmp_path / "run").repetitions[0].stop_reason == "target reached (accuracy >= 0.99)"


def test_measure_my_loop_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "measure_my_loop.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    series = re.findall(r"^\w+/\w+", printed, re.MULTILINE)
    names = ["forward/wall_clock", "backward/wall_clock", "train/data_wait", "train/step_time", "train/throughput"]
    assert series == names
    assert len(read_record(tmp_path / "runs" / "my_loop").repetitions[0].series["train/step_time"]) == 3 * 29


def last_loss(printed: str) -> float:
    lines = printed.splitlines()
    assert len(lines) == 5, printed
    return float(lines[-1].rpartition(" ")[2])


def test_dropin_alone(run: Run) -> None:
    assert last_loss(run("dropin.py")) < 0.1


def test_dropin_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_weft(capfd, "launch", "--workers", "2", EXAMPLES / "dropin.py")
    assert outcome.code == 0, outcome.err
    assert last_loss(outcome.out) < 0.1


def test_graph_gradient_penalty(run: Run) -> None:
    printed = run("graph_gradient_penalty.py")
    penalties = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(penalties) == 5 and penalties[-1] < 0.1 * penalties[0]


def test_graph_maxout(run: Run) -> None:
    printed = run("graph_maxout.py")
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < 0.02


def test_graph_loops(run: Run) -> None:
    printed = run("graph_loops.py")
    losses = [float(line.split()[-1]) for line in printed.splitlines() if re.match(r"step +\d+ +loss", line)]
    errors = [float(error) for error in re.findall(r"\d\.\de-\d+", printed)]
    assert len(losses) == 4 and losses[-1] < 0.05
    assert len(errors) == 2 and max(errors) < 1e-5


def test_a_script_in_stages(tmp_path: Path) -> None:
    """In one process and on two stages it prints the same losses, to rounding."""
    found = []
    for plan in ([], ["--plan", "pipeline=2 schedule=1f1b(4)"]):
        command = [sys.executable, "-m", "weft", "launch", *plan, *([] if plan else ["--workers", "1"])]
        command += [str(EXAMPLES / "train_pipeline.py")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        found.append([float(number) for number in re.findall(r"\d+\.\d+", done.stdout)])
    assert found[0] and found[1] == pytest.approx(found[0], abs=2e-3)
