"""Nine kinds of scripts, as others write them: two ranks give the parameters of one process, and print its numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.command_line import Outcome, run_weft
from tests.docs.documents import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tests" / "scripts"
WOVEN = ("mnist", "vae", "dcgan", "imagenet", "word_language_model", "nano_gpt", "hugging_face_loop", "lbfgs")
TRAINER = "hugging_face_trainer"
TOLERANCE = 1e-6
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Of every script: the file of parameters that one process left, and what it printed. Started by nobody."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, str(SCRIPTS / "one_after_another.py"), str(folder), *WOVEN, TRAINER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    printed = dict(part.split("\n", 1) for part in done.stdout.split("== ")[1:])
    return {name: (folder / f"{name}.pt", printed[name]) for name in (*WOVEN, TRAINER)}


def launch(capture: pytest.CaptureFixture[str], name: str, out: Path) -> Outcome:
    outcome = run_weft(capture, "launch", "--workers", "2", SCRIPTS / f"{name}.py", out)
    assert outcome.code == 0, outcome.err
    return outcome


def read_parameters(file: Path) -> dict[str, Tensor]:
    """Of a state dict, or of several by name."""
    parameters: dict[str, Tensor] = {}
    for name, value in torch.load(file).items():
        parameters |= {name: value} if isinstance(value, Tensor) else {f"{name}.{n}": v for n, v in value.items()}
    return parameters


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest of all tensors: the norm of the difference relative to the norm of ours."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return max(float((b - a).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)


def numbers_of(printed: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(printed)]


@pytest.mark.parametrize("name", WOVEN)
def test_two_ranks_are_as_one_process(
    name: str, alone: dict[str, tuple[Path, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, printed = alone[name]
    outcome = launch(capfd, name, tmp_path / "two.pt")
    assert difference(read_parameters(file), read_parameters(tmp_path / "two.pt")) < TOLERANCE
    assert NUMBER.sub("#", outcome.out) == NUMBER.sub("#", printed)
    assert numbers_of(outcome.out) == pytest.approx(numbers_of(printed), rel=1e-3, abs=1e-3)
    assert numbers_of(printed), "it prints how it trains"


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_a_trainer_joins(
    backend: str,
    alone: dict[str, tuple[Path, str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_TORCH_BACKEND", backend)
    outcome = launch(capfd, TRAINER, tmp_path / "two.pt")
    assert f"2 ranks by {backend}" in outcome.out
    assert difference(read_parameters(alone[TRAINER][0]), read_parameters(tmp_path / "two.pt")) < TOLERANCE


def test_a_parameter_that_is_off_is_found() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    assert difference(ours, {**ours, "b": torch.tensor([4.0001])}) == pytest.approx(2.5e-5, rel=1e-2)
