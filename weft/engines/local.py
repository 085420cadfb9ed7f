"""Ranks as processes of this machine: started together, ended together, the first failure told first."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from weft.engines.program import INTERRUPTED, Failure, Program, read_failure, read_result
from weft.errors import RankFailedError

__all__ = ["run_ranks"]

# How long the others may take to notice that a rank is gone and to say so, before they are ended.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02


def run_ranks(program: Program, num_ranks: int, *, silent: bool = False) -> list[Any]:
    """Run the program in `num_ranks` processes and return what each returned, in rank order.

    Ctrl-C is passed on to rank 0, which tells the others to stop between two steps; a second one ends all at once.

    Args:
        silent: send what ranks other than 0 print to nowhere (they print nothing of their own).

    Raises:
        RankFailedError: with the rank, text and exit code of the first failure that is not a mere witness.
        KeyboardInterrupt: if the ranks ended because of Ctrl-C.
    """
    folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        program.write(folder)
        with _use_passed_on_interrupt(ranks):
            ranks += [_start(folder, rank, num_ranks, silent) for rank in range(num_ranks)]
            _wait_for_all(ranks)
        codes = [process.returncode for process in ranks]
        if any(codes):
            raise _cause(folder, codes)
        return [read_result(folder, rank) for rank in range(num_ranks)]
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, rank: int, num_ranks: int, silent: bool) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "WEFT_RANK": str(rank),
        "WEFT_SIZE": str(num_ranks),
        "WEFT_MEETING": str(folder),
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
    }
    quiet = subprocess.DEVNULL if silent and rank > 0 else None
    # A session of its own, so that the terminal's Ctrl-C reaches this process alone, which passes it on.
    return subprocess.Popen(
        [sys.executable, "-m", "weft.engines.program", str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )


def _wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended, or when one failed and the others had their time of grace."""
    deadline = None
    while any(process.poll() is None for process in ranks):
        if deadline is None and any(process.poll() not in (None, 0) for process in ranks):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            _end(ranks)
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()


def _cause(folder: Path, codes: Sequence[int]) -> BaseException:
    """The failure that began it: the earliest that a rank told of itself, then a rank that was killed."""
    if INTERRUPTED in codes:
        return KeyboardInterrupt()
    told = [failure for rank in range(len(codes)) if (failure := read_failure(folder, rank))]
    causes = sorted((f for f in told if not f.is_witness), key=lambda f: f.moment)
    if causes:
        return _as_error(causes[0], len(codes))
    for rank, code in enumerate(codes):
        if code and read_failure(folder, rank) is None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return RankFailedError(f"rank {rank} of {len(codes)} {how}", rank, "", 3)
    return _as_error(min(told, key=lambda f: f.moment), len(codes))


def _as_error(failure: Failure, num_ranks: int) -> RankFailedError:
    text = f"rank {failure.rank} of {num_ranks}: {failure.text or failure.kind}"
    return RankFailedError(text, failure.rank, failure.traceback, failure.exit_code)


@contextmanager
def _use_passed_on_interrupt(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    requested = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        if ranks and ranks[0].poll() is None:
            ranks[0].send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
