"""Engines: they start a rank program in processes somewhere and bring back what each rank returned."""

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from weft.engines.failure import Failure, find_cause
from weft.engines.meeting import use_meeting_folder
from weft.engines.rank_program import (
    INTERRUPTED,
    RankProgram,
    has_result,
    keep_logs,
    log_of,
    read_failure,
    read_result,
)
from weft.engines.relay import Shows, use_relay
from weft.errors import RankFailedError, TrainingError
from weft.secret import make_secret, write_secret

__all__ = ["STRICT", "AbstractEngine", "AbstractRanks", "End", "Tolerance", "run_on"]

# A rank that is interrupted while it still imports ends by the signal itself.
INTERRUPTS = (INTERRUPTED, -signal.SIGINT)
LINES_IN_ERROR = 20


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


class AbstractRanks(ABC):
    """The ranks that an engine has started."""

    @abstractmethod
    def wait(self, tolerance: Tolerance) -> list[End]:
        """How each ended that ended by itself: the others had their time of grace after the first failure, no more."""

    @abstractmethod
    def interrupt(self, *, everyone: bool) -> None:
        """Send SIGINT to the first rank that is still there, which tells the others to stop between two steps; or to
        every rank."""

    @abstractmethod
    def end(self) -> None:
        """End what is left, and return when it is gone."""


class AbstractEngine(ABC):
    """Starts ranks somewhere. Each runs `weft.engines.rank_process.be_rank` on the folder, which all of them see."""

    @abstractmethod
    def start(self, folder: Path, num_ranks: int) -> AbstractRanks:
        """Start the rank program that the folder holds, or leave nothing behind.

        Args:
            folder: where the program lies, and where ranks leave results, failures and logs.
            num_ranks: processes to start.
        """


def run_on(
    engine: AbstractEngine,
    program: RankProgram,
    num_ranks: int,
    *,
    silent: bool = False,
    tolerance: Tolerance = STRICT,
    logs: Path | None = None,
    shows: Shows = "first",
    interrupts_all: bool = False,
) -> list[Any]:
    """Run the program on `num_ranks` ranks and return what each returned, in rank order; None for one that died and
    was done without.

    Rank 0 prints to the standard output and error of this process, each other rank to a log file of its own. Ctrl-C is
    passed on to rank 0, which tells the others to stop between two steps; a second one ends all at once.

    Args:
        engine: where ranks run.
        silent: do not repeat, at the end, what ranks other than 0 printed. What is kept in `logs` is not repeated.
        tolerance: the deaths that the run survives.
        logs: the folder in which the logs are kept, as `rank-N.log`, that of rank 0 too; None to keep none.
        shows: "all" to show every line that a rank prints, behind its number, as it comes.
        interrupts_all: Ctrl-C is passed on to every rank, for programs whose rank 0 does not tell the others.

    Raises:
        RankFailedError: with the rank, text and exit code of the first failure that is not a mere witness, and its
            traceback or else the end of that rank's log.
        KeyboardInterrupt: if the ranks ended because of Ctrl-C.
    """
    with use_meeting_folder() as folder:
        program.write(folder)
        write_secret(folder, make_secret())
        if logs is not None:
            keep_logs(folder, num_ranks, logs)
        with use_relay(folder, num_ranks, shows=shows, keeps_logs=logs is not None) as shown:
            ranks = engine.start(folder, num_ranks)
            try:
                with _use_passed_on_interrupt(lambda: ranks.interrupt(everyone=interrupts_all)):
                    ends = ranks.wait(tolerance)
            finally:
                ranks.end()
        _check_ends(folder, ends, num_ranks, tolerance, shown)
        if not silent and logs is None and shows == "first":
            _repeat_logs(folder, num_ranks)
        return [read_result(folder, rank) if has_result(folder, rank) else None for rank in range(num_ranks)]


def _check_ends(folder: Path, ends: Sequence[End], num_ranks: int, tolerance: Tolerance, shown: frozenset[int]) -> None:
    came_too_late = [end for end in ends if tolerance.is_return(end) and _is_witness(folder, end.rank)]
    counted = [end for end in ends if not tolerance.spares(end) and end not in came_too_late]
    failures = _read_failures(folder, counted, tolerance)
    _keep_last_words(folder, failures)
    if any(end.code in INTERRUPTS for end in ends):
        raise KeyboardInterrupt
    if failures:
        cause = find_cause(failures)
        told = cause.text or cause.kind
        # What is shown has the whole text at its end.
        text = f"rank {cause.rank} of {num_ranks}: {told.partition(chr(10))[0] if cause.shown else told}"
        if not cause.shown and cause.rank not in shown:
            text += _end_of_log(folder, cause.rank)
        others = _tell_others(cause, failures)
        raise RankFailedError(text, cause.rank, cause.traceback, cause.exit_code, cause.shown + others)


def _tell_others(cause: Failure, failures: Sequence[Failure]) -> str:
    """A line for every other rank that failed, each by itself, in another way or at another place."""
    others = [failure for failure in failures if not failure.is_witness and failure.rank != cause.rank]
    return "".join(
        f"rank {other.rank}: {other.text}{f' ({other.where})' if other.where else ''}\n"
        for other in sorted(others, key=lambda other: other.rank)
        if (other.text, other.where) != (cause.text, cause.where)
    )


def _keep_last_words(folder: Path, failures: Sequence[Failure]) -> None:
    """A log that is kept ends with the traceback, as what a process prints does."""
    for failure in failures:
        log = log_of(folder, failure.rank)
        if log.is_symlink() and failure.traceback:
            with log.open("a") as file:
                file.write(failure.shown or f"{failure.text}\n")


def _read_failures(folder: Path, ends: Sequence[End], tolerance: Tolerance) -> list[Failure]:
    """Failures as the ranks told them, and as they are known of those that could not tell."""
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
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended with exit code 0 and no result"


def _read_log(folder: Path, rank: int) -> list[str]:
    log = log_of(folder, rank)
    return log.read_text(errors="replace").splitlines() if log.is_file() else []


def _end_of_log(folder: Path, rank: int) -> str:
    lines, log = _read_log(folder, rank), log_of(folder, rank)
    where = f" ({log.resolve()})" if log.is_symlink() else ""
    return (
        "".join([f"; the end of its log{where}:", *(f"\n  {line}" for line in lines[-LINES_IN_ERROR:])])
        if lines
        else ""
    )


def _repeat_logs(folder: Path, num_ranks: int) -> None:
    for rank in range(1, num_ranks):
        for line in _read_log(folder, rank):
            print(f"rank {rank}: {line}", file=sys.stderr)


@contextmanager
def _use_passed_on_interrupt(interrupt: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C is passed on, the second is ours; signals are the main thread's business alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False

    def handle(_signal: int, _frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
