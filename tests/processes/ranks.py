"""Real processes as ranks for tests, forked from a server that has imported torch: milliseconds each, not seconds."""

import faulthandler
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.engines.fork_server import ForkedRank, fork_rank
from weft.engines.rank_program import RankProgram, has_result, log_of, read_failure, read_result

DEADLINE_SECONDS = 40.0
POLL_SECONDS = 0.005


def run_processes(
    path: str, size: int, *, deadline: float = DEADLINE_SECONDS, is_last_silent: bool = False, **arguments: Any
) -> list[Any]:
    """Call `module:function` with the arguments on every rank; results in rank order, None for a rank that died.

    A last rank that falls silent is ended when the others are done.

    Raises AssertionError with the first traceback of a rank that failed, or when the ranks outlive the deadline; then
    with what they printed, to which belongs the stack of each.
    """
    with tempfile.TemporaryDirectory(prefix="weft-test-") as name:
        folder = Path(name)
        RankProgram("tests.processes.ranks:call", {"path": path, "arguments": arguments, "deadline": deadline}).write(
            folder
        )
        ranks: list[ForkedRank] = []
        try:
            for rank in range(size):
                ranks.append(_start(folder, rank, size))
            is_late = not _join(ranks[:-1] if is_last_silent else ranks, deadline)
        finally:
            _end(ranks)
        failures = [failure for rank in range(size) if (failure := read_failure(folder, rank))]
        if failures:
            raise AssertionError(min(failures, key=lambda f: (f.is_witness, f.moment)).traceback)
        logs = [log.read_text() for rank in range(size) if (log := log_of(folder, rank)).exists()]
        assert not is_late, "\n".join([f"ranks were not done after {deadline} s", *logs])
        return [read_result(folder, rank) if has_result(folder, rank) else None for rank in range(size)]


def call(path: str, arguments: dict[str, Any], deadline: float) -> Any:
    """The program of a rank: one that is late shows where it is."""
    faulthandler.dump_traceback_later(deadline - 1)
    try:
        return RankProgram(path, arguments).call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _start(folder: Path, rank: int, size: int) -> ForkedRank:
    own = {"WEFT_RANK": str(rank), "WEFT_SIZE": str(size), "WEFT_MEETING": str(folder), "OMP_NUM_THREADS": "1"}
    forked = fork_rank(folder, {**os.environ, **own, "WEFT_STARTER": str(os.getpid())})
    assert forked is not None, "the fork server does not work here"
    return forked


def _join(ranks: Sequence[ForkedRank], seconds: float) -> bool:
    """Whether all ended in time."""
    until = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _end(ranks: Sequence[ForkedRank]) -> None:
    for rank in ranks:
        rank.kill()
        rank.wait()
