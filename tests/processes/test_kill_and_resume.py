"""A run that is killed with -9 at a random step goes on to the same bits, in one process and in two ranks."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import Weft
from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder

SETTINGS = ["--set", "epochs=1.2", "--set", "checkpoint_steps=5", "--set", "batch_size=64", "--quiet"]
DEADLINE = 100.0
RANKS = pytest.mark.parametrize("ranks", [[], ["--workers", "2"]], ids=["one process", "two ranks"])


def start_and_kill(*arguments: str, log: Path, step: int) -> None:
    """A process of its own: watch the log for the step, then kill. The run may get a few steps further, which is the
    point."""
    command = [sys.executable, "-m", "weft", "run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_bytes().count(b'"StepEnded"') >= step:
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()


def check_killed_and_resumed(weft: Weft, folder: Path, ranks: list[str], step: int) -> None:
    if not (folder / "whole").exists():
        weft("run", "digits_cnn", *SETTINGS, *ranks, "--out", folder / "whole")
    cut = folder / f"cut-{step}"
    start_and_kill("digits_cnn", *SETTINGS, *ranks, "--out", str(cut), log=cut / "log.jsonl", step=step)
    assert read_record(cut).repetitions[0].status == "running"
    assert list(RunFolder(cut).checkpoint.rglob("index.json"))

    weft("run", "--resume", cut, "--quiet")
    whole, resumed = (read_record(path).repetitions[0] for path in (folder / "whole", cut))
    assert resumed.status == "done"
    assert resumed.hashes == whole.hashes
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]


@pytest.mark.slow
@RANKS
def test_killed_at_a_random_step_and_resumed(weft: Weft, tmp_path: Path, ranks: list[str]) -> None:
    check_killed_and_resumed(weft, tmp_path, ranks, random.Random(len(ranks)).randint(6, 18))


@pytest.mark.long
@RANKS
def test_killed_at_any_step_and_resumed(weft: Weft, tmp_path: Path, ranks: list[str]) -> None:
    for step in range(6, 21):  # the first checkpoint is written after step 5
        check_killed_and_resumed(weft, tmp_path, ranks, step)
