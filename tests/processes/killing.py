"""Ranks of a run that are killed with -9 once it is under way."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.engines.rank_program import has_joined, read_process

DEADLINE = 100.0


def meeting_folder() -> Path:
    """The folder in which the ranks of the one run meet."""
    (folder,) = Path(tempfile.gettempdir()).glob("weft-ranks-*")
    return folder


def wait_until(is_so: Callable[[], bool], goes_on: Callable[[], bool], otherwise: str) -> None:
    """Look again and again while the run goes on, up to a deadline."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and goes_on():
        if is_so():
            return
        time.sleep(0.002)
    raise AssertionError(otherwise)


def kill_when_under_way(goes_on: Callable[[], bool], run: Path, rank: int, *, is_server: bool = False) -> None:
    """Kill a rank with -9 after some steps of rank 0, when the others know it too: ranks do not start together."""
    log = run / "log.jsonl"

    def is_under_way() -> bool:
        if not log.exists() or log.read_bytes().count(b'"StepEnded"') < 10:
            return False
        return is_server or has_joined(meeting_folder(), rank)

    wait_until(is_under_way, goes_on, "the run did not get under way")
    victim = read_process(meeting_folder(), rank)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)


@contextmanager
def use_killer(run: Path, *ranks: int, server: int | None = None) -> Iterator[None]:
    """A thread kills these ranks, one after another and the server last, of the run that this process starts inside."""
    failures: list[BaseException] = []
    has_ended = threading.Event()

    def kill() -> None:
        try:
            for rank in (*ranks, *([] if server is None else [server])):
                kill_when_under_way(lambda: not has_ended.is_set(), run, rank, is_server=rank == server)
        except BaseException as error:
            failures.append(error)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        has_ended.set()
        killer.join()
    assert not failures, failures[0]
