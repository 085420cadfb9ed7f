"""The examples, run as a user runs them: each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT
from weft.records import read_record

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
WEFT = ("-m", "weft")


def run(*arguments: str, cwd: Path) -> str:
    """What Python prints when it is run with these arguments; warnings are errors."""
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [example.name for example in EXAMPLES.glob("*.py") if f'"{example.name}"' not in text] == []


def test_own_recipe(tmp_path: Path) -> None:
    out = tmp_path / "run"
    path = (EXAMPLES / "own_recipe.py").relative_to(ROOT)
    printed = run(*WEFT, "run", f"{path}:recipe", "--quiet", "--out", str(out), cwd=ROOT)
    assert "PASS  test/accuracy >= 0.97" in printed
    assert read_record(out).repetitions[0].stop_reason == "target reached (accuracy >= 0.99)"


def test_measure_my_loop(tmp_path: Path) -> None:
    printed = run(str(EXAMPLES / "measure_my_loop.py"), cwd=tmp_path)
    series = re.findall(r"^\w+/\w+", printed, re.MULTILINE)
    names = ["forward/wall_clock", "backward/wall_clock", "train/data_wait", "train/step_time", "train/throughput"]
    assert series == names
    assert len(read_record(tmp_path / "runs" / "my_loop").repetitions[0].series["train/step_time"]) == 3 * 29


def last_loss(printed: str) -> float:
    lines = printed.splitlines()
    assert len(lines) == 5, printed
    return float(lines[-1].rpartition(" ")[2])


def test_dropin_alone_and_on_two_ranks(tmp_path: Path) -> None:
    script = str(EXAMPLES / "dropin.py")
    assert last_loss(run(script, cwd=tmp_path)) < 0.1
    assert last_loss(run(*WEFT, "launch", "--workers", "2", script, cwd=tmp_path)) < 0.1


def test_graph_gradient_penalty(tmp_path: Path) -> None:
    printed = run(str(EXAMPLES / "graph_gradient_penalty.py"), cwd=tmp_path)
    penalties = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(penalties) == 5 and penalties[-1] < 0.1 * penalties[0]


def test_graph_maxout(tmp_path: Path) -> None:
    printed = run(str(EXAMPLES / "graph_maxout.py"), cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < 0.02


def test_graph_loops(tmp_path: Path) -> None:
    printed = run(str(EXAMPLES / "graph_loops.py"), cwd=tmp_path)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if re.match(r"step +\d+ +loss", line)]
    errors = [float(error) for error in re.findall(r"\d\.\de-\d+", printed)]
    assert len(losses) == 4 and losses[-1] < 0.05
    assert len(errors) == 2 and max(errors) < 1e-5
