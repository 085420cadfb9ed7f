"""Ranks as processes of this machine: started together, ended together, the first failure told first."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from weft.distributed.secret import make_secret, write_secret
from weft.engines.program import INTERRUPTED, Failure, Program, has_joined, has_result, read_failure, read_result
from weft.errors import RankFailedError, TrainingError

__all__ = ["STRICT", "Tolerance", "find_cause", "run_ranks", "threads_per_rank"]

# How long the others may take to notice that a rank is gone and to say so, before they are ended.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02

# A rank that is interrupted while it still imports ends by the signal itself.
INTERRUPTS = (INTERRUPTED, -signal.SIGINT)


@dataclass(frozen=True)
class End:
    """A rank that has ended, with its exit code and about when (seconds since the epoch).
    `num_lives` is how often it had been started. One that the others have not come to know is waited for by them.
    """

    rank: int
    code: int
    moment: float
    num_lives: int = 1
    has_joined: bool = True


@dataclass(frozen=True)
class Tolerance:
    """The deaths that a run survives: processes that are killed (an error of their own is another matter).

    `expendable` ones are done without, once they have joined, and started again at most `most_returns` times in all;
    `restored` ones are started again, each at most `most_restarts` times.
    """

    expendable: frozenset[int] = frozenset()
    restored: frozenset[int] = frozenset()
    most_restarts: int = 3
    most_returns: int = 0

    def spares(self, end: End) -> bool:
        return end.has_joined and end.rank in self.expendable and end.code < 0 and end.code not in INTERRUPTS

    def restores(self, end: End, num_restarts: int) -> bool:
        return end.rank in self.restored and end.code < 0 and num_restarts < self.most_restarts

    def takes_back(self, end: End, num_returns: int) -> bool:
        return self.spares(end) and num_returns < self.most_returns

    def is_return(self, end: End) -> bool:
        """Whether a rank that can be done without has ended that was not there from the beginning."""
        return end.rank in self.expendable and end.num_lives > 1


STRICT = Tolerance()
"""No rank can be done without."""


def run_ranks(program: Program, num_ranks: int, *, silent: bool = False, tolerance: Tolerance = STRICT) -> list[Any]:
    """Run the program in `num_ranks` processes and return what each returned, in rank order; None for one that died
    and was done without.

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
        write_secret(folder, make_secret())
        for rank in range(num_ranks):
            ranks.append(_start(folder, rank, num_ranks, silent))
        with _use_passed_on_interrupt(ranks):
            ends = _wait_for_all(ranks, folder, tolerance, lambda rank: _start(folder, rank, num_ranks, silent))
        came_too_late = [end for end in ends if tolerance.is_return(end) and _is_witness(folder, end.rank)]
        counted = [end for end in ends if not tolerance.spares(end) and end not in came_too_late]
        failures = _read_failures(folder, counted, tolerance)
        if any(end.code in INTERRUPTS for end in ends):
            raise KeyboardInterrupt
        if failures:
            raise _as_error(find_cause(failures), num_ranks)
        return [read_result(folder, rank) if has_result(folder, rank) else None for rank in range(num_ranks)]
    finally:
        _end(ranks)
        shutil.rmtree(folder, ignore_errors=True)


def threads_per_rank(num_ranks: int) -> int:
    """How many threads each of so many ranks on this machine computes with."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _start(folder: Path, rank: int, num_ranks: int, silent: bool) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "WEFT_RANK": str(rank),
        "WEFT_SIZE": str(num_ranks),
        "WEFT_MEETING": str(folder),
        "WEFT_STARTER": str(os.getpid()),
        "OMP_NUM_THREADS": str(threads_per_rank(num_ranks)),
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


def _wait_for_all(
    ranks: list[subprocess.Popen[bytes]],
    folder: Path,
    tolerance: Tolerance = STRICT,
    restart: Callable[[int], subprocess.Popen[bytes]] | None = None,
) -> list[End]:
    """How each ended that ended by itself: the others had their time of grace after the first failure, and no more.

    One that was started again and finds that the others have ended has it too, after rank 0.
    """
    restarts: Counter[int] = Counter()
    ends: list[End] = []
    alive = set(range(len(ranks)))
    deadline = float("inf")
    while alive and time.monotonic() < deadline:
        for rank in sorted(alive):
            code = ranks[rank].poll()
            if code is not None:
                end = End(rank, code, time.time() - POLL_SECONDS, 1 + restarts[rank], has_joined(folder, rank))
                num_returns = sum(restarts[one] for one in tolerance.expendable)
                is_missed = tolerance.restores(end, restarts[rank]) or (
                    0 in alive and tolerance.takes_back(end, num_returns)
                )
                if restart is not None and is_missed:
                    restarts[rank] += 1
                    ranks[rank] = restart(rank)
                    continue
                alive.remove(rank)
                ends.append(end)
                if code and not tolerance.spares(end) and not tolerance.is_return(end):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if 0 not in alive and all(rank in tolerance.expendable and restarts[rank] for rank in alive):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS if alive else 0)
    return ends


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()


def _read_failures(folder: Path, ends: Sequence[End], tolerance: Tolerance) -> list[Failure]:
    """What the ranks told of their failures, and what is known of those that could not tell."""
    failures = []
    for end in ends:
        told = read_failure(folder, end.rank)
        if told is not None:
            failures.append(told)
        elif end.code or not has_result(folder, end.rank):
            exit_code = end.code if end.code > 0 else TrainingError.exit_code
            text = _tell(end.code)
            if end.rank in tolerance.expendable and not end.has_joined:
                text += " before the others knew it (one that they know is done without); start again"
            failures.append(Failure(end.rank, end.moment, "", text, "", exit_code, is_witness=False))
    return failures


def _is_witness(folder: Path, rank: int) -> bool:
    told = read_failure(folder, rank)
    return told is not None and told.is_witness


def _tell(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} and no result"


def find_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that began it: the first that is not a witness of another's."""
    return min(failures, key=lambda failure: (failure.is_witness, failure.moment))


def _as_error(failure: Failure, num_ranks: int) -> RankFailedError:
    text = f"rank {failure.rank} of {num_ranks}: {failure.text or failure.kind}"
    return RankFailedError(text, failure.rank, failure.traceback, failure.exit_code)


@contextmanager
def _use_passed_on_interrupt(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """The first Ctrl-C goes to the first rank that is still there; signals are the main thread's business alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        alive = [rank for rank in ranks if rank.poll() is None]
        if alive:
            alive[0].send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
