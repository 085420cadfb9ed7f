"""The command line in this process, in a folder of its own, with what it printed and its exit code."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The standard output, which must be one strict JSON document."""
        return json.loads(self.out, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


Weft = Callable[..., Outcome]

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
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = left.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two seeds were trained in."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.raises(SystemExit, match="1"):
        main(["run", *TINY, "--repeat", "2", "--out", str(path), "--quiet"])
    return path
