"""The command line in this process, whose fork server starts the ranks; and a folder of temporary files for each test,
in which it finds those of the processes that it starts."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.cli.main import main

Weft = Callable[..., str]


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Not in tmp_path, whose names are too long for sockets; but after it, which pytest makes where it finds TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def weft(capfd: pytest.CaptureFixture[str]) -> Weft:
    """`weft("run", "digits_mlp")`, as `weft run digits_mlp`: what it and its ranks printed to standard error."""

    def run(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        errors = capfd.readouterr().err
        assert left.value.code in (None, 0, 1), errors
        return errors

    return run
