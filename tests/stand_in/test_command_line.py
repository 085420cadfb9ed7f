"""`weft` where the stand-in accelerator is installed, as torch finds one that is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.records.record_file import read_record

INSTALLED = Path(__file__).parent / "installed"


def weft(*arguments: str) -> str:
    """What the command shows; a process of its own, which has the accelerator from its start."""
    paths = os.pathsep.join([str(INSTALLED), str(Path(__file__).parents[2])])
    command = [sys.executable, "-m", "weft", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_takes_the_accelerator_that_is_there(tmp_path: Path) -> None:
    settings = [word for text in ("epochs=0.5", "schedule=constant") for word in ("--set", text)]
    shown = weft("run", "digits_mlp", *settings, "--plan", "data=2", "--quiet", "--out", str(tmp_path / "run"))
    assert shown.count("tensors of standin:0 travel between ranks by way of host memory") == 1
    record = read_record(tmp_path / "run")
    assert record.machine["device"] == "standin:0"
    assert record.repetitions[0].status == "done"
