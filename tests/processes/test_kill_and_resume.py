"""A run that is killed with -9 at a random step goes on to the same bits, in one process and in two ranks."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder

SETTINGS = ["--set", "epochs=1.2", "--set", "checkpoint_steps=5", "--set", "batch_size=64", "--quiet"]
DEADLINE = 100.0


def weft(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "weft", "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode in (0, 1), errors.decode()
    return process.returncode


def kill_at(process: subprocess.Popen[bytes], log: Path, step: int) -> None:
    """Watch the log for the step, then kill. The run may get a few steps further, which is the point."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_bytes().count(b'"StepEnded"') >= step:
            break
        time.sleep(0.002)
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["--workers", "2"]], ids=["one process", "two ranks"])
def test_killed_at_a_random_step_and_resumed(tmp_path: Path, ranks: list[str]) -> None:
    finish(weft("digits_cnn", *SETTINGS, *ranks, "--out", str(tmp_path / "whole")))
    step = random.Random(len(ranks)).randint(6, 18)
    kill_at(weft("digits_cnn", *SETTINGS, *ranks, "--out", str(tmp_path / "cut")), tmp_path / "cut" / "log.jsonl", step)
    assert read_record(tmp_path / "cut").repetitions[0].status == "running"
    assert list(RunFolder(tmp_path / "cut").checkpoint.rglob("index.json"))

    finish(weft("--resume", str(tmp_path / "cut"), "--quiet"))
    whole, resumed = (read_record(tmp_path / name).repetitions[0] for name in ("whole", "cut"))
    assert resumed.status == "done"
    assert resumed.hashes == whole.hashes
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]
