"""The command line in this process, whose fork server starts the ranks; and a folder of temporary files for each test,
in which it finds those of the processes that it starts."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Outcome, Weft, run_weft


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Not in tmp_path, whose names are too long for sockets; but after it, which pytest makes where it finds TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def weft(capfd: pytest.CaptureFixture[str]) -> Weft:
    """`weft("run", "digits_mlp")`, as `weft run digits_mlp`, which must not fail."""

    def run(*arguments: str | Path) -> Outcome:
        outcome = run_weft(capfd, *arguments)
        assert outcome.code in (0, 1), outcome.err
        return outcome

    return run
