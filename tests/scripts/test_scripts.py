"""Nine kinds of scripts, as others write them: two ranks give the parameters of one process, and print its numbers."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.command_line import Outcome, run_weft
from tests.docs.documents import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "tests" / "scripts"
WOVEN = ("mnist", "vae", "dcgan", "imagenet", "word_language_model", "nano_gpt", "hugging_face_loop", "lbfgs")
TOLERANCE = 1e-6
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+")


def run(capture: pytest.CaptureFixture[str], name: str, num_ranks: int, out: Path, *arguments: str) -> Outcome:
    outcome = run_weft(capture, "launch", "--workers", str(num_ranks), SCRIPTS / f"{name}.py", out, *arguments)
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
def test_two_ranks_are_as_one_process(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    alone = run(capfd, name, 1, tmp_path / "one.pt")
    both = run(capfd, name, 2, tmp_path / "two.pt")
    assert difference(read_parameters(tmp_path / "one.pt"), read_parameters(tmp_path / "two.pt")) < TOLERANCE
    assert NUMBER.sub("#", both.out) == NUMBER.sub("#", alone.out)
    assert numbers_of(both.out) == pytest.approx(numbers_of(alone.out), rel=1e-3, abs=1e-3)
    assert numbers_of(alone.out), "it prints how it trains"


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_the_trainer_joins(backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(capfd, "hugging_face_trainer", 1, tmp_path / "one.pt", backend)
    run(capfd, "hugging_face_trainer", 2, tmp_path / "two.pt", backend)
    assert difference(read_parameters(tmp_path / "one.pt"), read_parameters(tmp_path / "two.pt")) < 1e-5


def test_a_parameter_that_is_off_is_found() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0])}
    assert difference(ours, {**ours, "b": torch.tensor([4.0001])}) == pytest.approx(2.5e-5, rel=1e-2)
