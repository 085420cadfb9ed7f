"""The command line in this process, in a folder of its own, with what it printed and its exit code."""

from pathlib import Path

import pytest

from tests.command_line import Outcome, Weft, run_weft
from weft.cli.main import main

# Digits in five steps of a small perceptron: the real thing in a tenth of a second, not accepted.
SETTINGS = ("epochs=0.5", "batch_size=128", "model.hidden=16", "target=none", "schedule=constant")
TINY = ("digits_mlp", *(f"--set={setting}" for setting in SETTINGS))


@pytest.fixture
def tiny() -> tuple[str, ...]:
    return TINY


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Weft:
    """`weft("run", "digits_mlp")`, as `weft run digits_mlp` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str | Path) -> Outcome:
        return run_weft(capsys, *arguments)

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two seeds were trained in."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.raises(SystemExit, match="1"):
        main(["run", *TINY, "--repeat", "2", "--out", str(path), "--quiet"])
    return path
