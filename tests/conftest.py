"""What every test gets: fixed seeds, one thread, and a police that fails a test which leaves something behind."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import settings

from weft.engines.fork_server import find_fork_server

# A shell starts what runs in its background deaf to Ctrl-C, and so would be all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Derandomised: a test that passes once passes always. No database: a test leaves no files behind.
settings.register_profile("weft", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("weft")

# pytest renames the current test between phases; scikit-learn, torch and JAX set the others when they are first used.
FREE_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF_CPP_MIN_LOG_LEVEL",
    "TORCHINDUCTOR_CACHE_DIR",
    "TPU_SKIP_MDS_QUERY",
}


@dataclass(frozen=True)
class Belongings:
    """What a test could leave behind."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    variables: dict[str, str]
    folder: str


@pytest.fixture(autouse=True)
def fixed_start() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = belongings()
    yield
    leaks = find_leaks(before, belongings())
    clean_up(before)
    assert not leaks, f"the test left something behind: {'; '.join(leaks)}"


@pytest.fixture(scope="session")
def xla_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xla")


@pytest.fixture
def xla_cache(xla_folder: Path) -> Iterator[None]:
    """XLA compiles a graph once in a session, however often an executor is built."""
    import jax  # here because most tests have no use for it

    settings = {"jax_compilation_cache_dir": str(xla_folder), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    yield
    for name, value in before.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


@pytest.fixture
def police() -> SimpleNamespace:
    """The police itself, for the test that plants leaks."""
    return SimpleNamespace(belongings=belongings, find_leaks=find_leaks, clean_up=clean_up)


def belongings() -> Belongings:
    variables = {key: value for key, value in os.environ.items() if key not in FREE_VARIABLES}
    return Belongings(frozenset(threading.enumerate()), _children(), variables, os.getcwd())


def find_leaks(before: Belongings, after: Belongings) -> list[str]:
    threads = after.threads - before.threads
    for thread in threads:
        thread.join(timeout=1)  # one that was told to stop may still be on its way out
    changed = {key for key, _ in before.variables.items() ^ after.variables.items()}
    return [
        *sorted(f"thread {thread.name}" for thread in threads if thread.is_alive()),
        *(f"child process {child}" for child in sorted(after.children - before.children)),
        *(f"environment variable {key}" for key in sorted(changed)),
        *([f"current folder {after.folder}"] if after.folder != before.folder else []),
    ]


def clean_up(before: Belongings) -> None:
    """Put back what can be put back, so that one leak does not fail the tests that follow."""
    os.chdir(before.folder)
    for key in os.environ.keys() - before.variables.keys() - FREE_VARIABLES:
        del os.environ[key]
    os.environ.update(before.variables)


def _children() -> frozenset[int]:
    """Child processes, without those that are kept for the session: the tracker of multiprocessing, our fork server."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case: none at all, and no need to look through /proc
        return frozenset()
    kept = {resource_tracker._resource_tracker._pid, find_fork_server()}  # type: ignore[attr-defined]
    folders = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return frozenset(int(f.name) for f in folders if _parent(f) == os.getpid() and int(f.name) not in kept)


def _parent(process: Path) -> int:
    try:
        after_name = (process / "stat").read_text().rpartition(")")[2]
    except OSError:  # it ended while we looked
        return 0
    return int(after_name.split()[1])
