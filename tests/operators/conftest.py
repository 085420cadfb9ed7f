"""One cache of compiled sources for all tests of operators, apart from the user's."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_cache(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's compiler draws a progress bar where tqdm is installed, and tqdm keeps a thread for it."""
    if importlib.util.find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
