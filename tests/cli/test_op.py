"""`weft op check` and `weft op bench`: tables, JSON and exit codes."""

from pathlib import Path
from typing import Any

import pytest

from tests.operators.rooflines import ROUND

RIGHT = """
import torch
from torch import Tensor
from weft.operators import operator

class Double:
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def backward(self, grads, inputs, outputs):
        return {slope} * grads[0]

    def samples(self):
        return [torch.randn(2, 3)]

double = operator(Double, name="cli::double_{name}")
"""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("operators"), "right", "2")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("operators"), "wrong", "3")


def write(folder: Path, name: str, slope: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(RIGHT.format(name=name, slope=slope))
    return path


def test_a_right_operator_passes(weft: Any, right: Path) -> None:
    outcome = weft("op", "check", right)
    assert (outcome.code, outcome.err) == (0, "")
    assert "cli::double_right" in outcome.out and "FAIL" not in outcome.out
    assert outcome.out.splitlines()[-1].startswith("PASS: ")


def test_a_wrong_gradient_fails_and_says_where(weft: Any, wrong: Path) -> None:
    outcome = weft("op", "check", wrong)
    assert outcome.code == 1
    line = next(line for line in outcome.out.splitlines() if line.strip().startswith("gradient"))
    assert "FAIL" in line and "output 0 by x: at [" in line and "6 of 6 elements differ" in line


def test_json_has_every_finding(weft: Any, wrong: Path) -> None:
    outcome = weft("op", "check", wrong, "--json")
    assert outcome.code == 1 and outcome.json["passed"] is False
    failed = {finding["check"] for finding in outcome.json["findings"] if not finding["passed"]}
    assert "gradient" in failed and "forward" not in failed


def test_many_faults_are_cut(weft: Any, tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(RIGHT.format(name="many", slope="3").replace("[torch.randn(2, 3)]", "[torch.randn(2)] * 12"))
    assert "and 4 more; --json has all" in weft("op", "check", path).out


def test_a_file_that_is_missing_is_wrong_use(weft: Any) -> None:
    outcome = weft("op", "check", "absent.py")
    assert outcome.code == 2 and "absent.py" in outcome.err


@pytest.fixture
def round_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.operators.roofline.measure_roofline", lambda threads: ROUND)


@pytest.mark.usefixtures("round_roofline")
def test_bench_draws_the_roofline(weft: Any, right: Path) -> None:
    outcome = weft("op", "bench", right, "--seconds", "0.01")
    assert (outcome.code, outcome.err) == (0, "")
    assert "A  cli::double_right  forward    2x3" in outcome.out
    assert "GFLOP/s" in outcome.out and "FLOP/B" in outcome.out
    assert "60.00 GFLOP/s  64.00 GFLOP/s from 2.00 GHz x 256 bits x 2 multiply-adds a cycle" in outcome.out


@pytest.mark.usefixtures("round_roofline")
def test_bench_as_json(weft: Any, right: Path) -> None:
    document = weft("op", "bench", right, "--seconds", "0.01", "--json").json
    assert [result["direction"] for result in document["results"]] == ["forward", "backward"]
    assert document["results"][0]["cost"]["flops"] == 6
    assert document["roofline"]["ceilings"][-1]["name"] == "DRAM"
