"""A folder of temporary files for each test, in which it finds those of the processes that it starts."""

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not in tmp_path, whose names are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield
