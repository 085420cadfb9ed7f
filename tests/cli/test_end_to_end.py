"""The command as a user starts it: a process of its own, a pipe, a terminal, a Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.records.record_file import read_record

pytestmark = pytest.mark.slow

WEFT = (sys.executable, "-m", "weft")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
RECIPE = ("run", "digits_mlp", "--set", "model.hidden=16", "--set", "target=none", "--set", "schedule=constant")


def weft(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*WEFT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False, timeout=120)


def start_and_interrupt(arguments: tuple[str, ...], cwd: Path) -> tuple[int, str]:
    """Start a run, press Ctrl-C when it reports its first step, and wait for its end."""
    with subprocess.Popen(
        [*WEFT, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd
    ) as run:
        assert run.stderr is not None
        said = ""
        while "loss" not in said:
            line = run.stderr.readline()
            assert line, f"ended before its first step: {said}"
            said += line
        run.send_signal(signal.SIGINT)
        rest = run.communicate(timeout=120)[1]
        return run.returncode, said + rest


def on_a_terminal(arguments: tuple[str, ...], cwd: Path) -> tuple[int, str]:
    """Run on a pseudo-terminal of 100 columns and return the code and all that was written to it."""
    controller, terminal = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen([*WEFT, *arguments], stdout=terminal, stderr=terminal, cwd=cwd, env=environment) as run:
        os.close(terminal)
        seen = b""
        try:
            while chunk := os.read(controller, 65536):
                seen += chunk
        except OSError:  # Linux reports the end of the other side as an error
            pass
        os.close(controller)
        run.wait(timeout=120)
    return run.returncode, seen.decode()


def results(path: Path) -> list[dict[str, Any]]:
    return [{"hashes": r.hashes, "losses": r.series["train/loss"]} for r in read_record(path).repetitions]


def test_interrupted_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--set", "epochs=8", "--set", "batch_size=16")
    code, said = start_and_interrupt((*RECIPE, *settings, "--out", "cut"), tmp_path)
    assert code == 130, said
    assert said.endswith("interrupted; go on with: weft run --resume cut\n")
    assert read_record(tmp_path / "cut").repetitions[0].status == "interrupted"

    monkeypatch.chdir(tmp_path)
    for line in (("run", "--resume", "cut"), (*RECIPE, *settings, "--out", "whole")):
        with pytest.raises(SystemExit, match=r"[01]"):
            main(line)
    assert "note: resumed from step" in capsys.readouterr().err
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_run_in_a_pipe(tmp_path: Path) -> None:
    done = weft(*RECIPE, "--set", "epochs=0.5", "--json", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1, done
    assert json.loads(done.stdout)["path"] == "run"
    assert "\x1b" not in done.stdout + done.stderr


def test_run_on_a_terminal(tmp_path: Path) -> None:
    code, seen = on_a_terminal((*RECIPE, "--set", "epochs=2", "--out", "run"), tmp_path)
    assert code == 1, seen
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", seen)
    assert re.search(r"seed 0 ━+ +100% +accuracy [0-9.]+  all samples used after 0:", plain)
    assert "\x1b[1;31mFAIL" in seen, "a failed rule is red on a terminal"


def test_reader_that_goes_away_is_no_bug(tmp_path: Path) -> None:
    command = f"{sys.executable} -m weft list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=60
    )
    assert done.stdout == "recipes\n" and "Traceback" not in done.stderr
