"""examples/train.py and the same script made distributed: few lines, one result, any launcher and any plan."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.command_line import run_weft
from tests.docs.changed_lines import Changed, changed_lines
from tests.docs.documents import ROOT
from tests.processes.launchers import mpirun, torchrun
from tests.scripts.test_scripts import difference
from weft.distributed.script.saving.saving import read_state_dict
from weft.training.datasets.mnist import fashion_mnist_files

EXAMPLES = ROOT / "examples"
PLAIN, WOVEN = EXAMPLES / "train.py", EXAMPLES / "train_weft.py"
PEERS = {"train_ddp.py": "torch", "train_accelerate.py": "accelerate", "train_fabric.py": "lightning_fabric"}
PAGE = ROOT / "docs" / "scripts_by_others.md"
TINY = ("--limit", "601", "--epochs", "2")  # 10 steps an epoch, the last one with 25 pictures
HALFWAY = ("--stop-after", "13")  # in mid-epoch
ROUNDING = 1e-6
PLANS = (
    "data=2 topology=ring",
    "data=2 compress=bf16",
    "shard=2",
    "data=2 consistency=local(8)",
    "data=2 consistency=gossip",
    "data=2 consistency=async topology=server",
)
needs_data = pytest.mark.skipif(
    not fashion_mnist_files().availability().found,
    reason=f"Fashion-MNIST is not on this machine; {fashion_mnist_files().cure}",
)


def changed_in(name: str) -> Changed:
    return changed_lines(PLAIN.read_text(encoding="utf-8"), (EXAMPLES / name).read_text(encoding="utf-8"))


def test_six_lines_make_it_distributed() -> None:
    assert changed_in(WOVEN.name).written <= 6


@pytest.mark.parametrize("name", [WOVEN.name, *PEERS])
def test_the_page_counts_the_lines(name: str) -> None:
    row = re.search(rf"\[{re.escape(name)}\].*?\| (\d+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"))
    assert row is not None
    assert Changed(int(row[1]), int(row[2])) == changed_in(name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the plain script, which ran to its end in this process."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *TINY, "--out", str(folder)])
        runpy.run_path(str(PLAIN), run_name="__main__")
    yield folder


def parameters_of(folder: Path) -> dict[str, Tensor]:
    return dict(read_state_dict(folder / "checkpoint", "model"))


def check_is_plain(plain: Path, folder: Path) -> None:
    """One process's parameters, and one log with its numbers."""
    trained = torch.load(plain / "checkpoint")["model"]
    assert difference(trained, parameters_of(folder)) < ROUNDING
    rows = [[float(value) for value in line.split(",")] for line in (folder / "log.csv").read_text().splitlines()]
    expected = [[float(value) for value in line.split(",")] for line in (plain / "log.csv").read_text().splitlines()]
    assert len(rows) == len(expected) == 2
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_do_the_same_job(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Under `weft launch`, which sets what torchrun sets."""
    if find_spec(PEERS[name]) is None:
        pytest.skip("a peer of benchmarks/requirements.txt, not of the tests")
    outcome = run_weft(capfd, "launch", "--workers", "2", EXAMPLES / name, *TINY, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["1", "2"] and float(rows[1][1]) < float(rows[0][1])


def launch(capture: pytest.CaptureFixture[str], num_ranks: int, folder: Path, *arguments: str) -> str:
    outcome = run_weft(capture, "launch", "--workers", str(num_ranks), WOVEN, *TINY, "--out", folder, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.out


@needs_data
@pytest.mark.slow
def test_two_ranks_of_weft_launch(plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(launch(capfd, 2, tmp_path).splitlines()) == 2
    check_is_plain(plain, tmp_path)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("command", [torchrun(2), mpirun(2)], ids=["torchrun", "mpirun"])
def test_two_ranks_of_other_launchers(command: list[str], plain: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = [str(WOVEN), *TINY, "--out", str(tmp_path)]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, "rank 0 alone prints"
    check_is_plain(plain, tmp_path)


@needs_data
@pytest.mark.slow
def test_resumed_in_mid_epoch_by_more_and_by_fewer_ranks(
    plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(capfd, 2, tmp_path / "more", *HALFWAY)
    shutil.copytree(tmp_path / "more", tmp_path / "fewer")
    launch(capfd, 3, tmp_path / "more", "--resume")
    launch(capfd, 1, tmp_path / "fewer", "--resume")
    check_is_plain(plain, tmp_path / "more")
    check_is_plain(plain, tmp_path / "fewer")


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_plans_by_the_command_alone(plan: str, plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_weft(capfd, "launch", "--plan", plan, WOVEN, *TINY, "--out", tmp_path)
    assert outcome.code == 0, outcome.err
    losses = [float(line.split(",")[1]) for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0] < 2.4
    trained = torch.load(plain / "checkpoint")["model"]
    is_exact = "consistency" not in plan and "compress" not in plan
    assert (difference(trained, parameters_of(tmp_path)) < ROUNDING) == is_exact
