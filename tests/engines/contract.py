"""What every engine must do. Each check takes an engine, and a folder of its own for pipes and logs."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from weft.engines.engine import AbstractEngine, run_on
from weft.engines.rank_program import RankProgram
from weft.errors import RankFailedError

DEADLINE_SECONDS = 60

Check = Callable[[AbstractEngine, Path], None]


def program(name: str, **arguments: object) -> RankProgram:
    return RankProgram(f"tests.processes.plain:{name}", arguments)


def read_pids(pipe: Path, num_ranks: int) -> dict[int, int]:
    """The process of each rank, when all have checked in."""
    pids: dict[int, int] = {}
    while len(pids) < num_ranks:
        with pipe.open() as file:
            pids |= {int(rank): int(pid) for rank, pid in map(str.split, file)}
    return pids


def is_running(pid: int) -> bool:
    """Not one that waits for init to take note of its end, after the process that started it was killed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Return when the process is gone, which is not our child."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(1000 * DEADLINE_SECONDS), f"process {pid} is still there"
        finally:
            os.close(descriptor)


def give_results(engine: AbstractEngine, _folder: Path) -> None:
    """In the order of ranks, each of which knows its place; and no process is left."""
    results = run_on(engine, program("tell", word="weft"), 3)
    assert [(r["word"], r["rank"], r["size"]) for r in results] == [("weft", rank, 3) for rank in range(3)]
    assert len({r["pid"] for r in results}) == 3
    assert not any(is_running(r["pid"]) for r in results)


def tell_cause(engine: AbstractEngine, _folder: Path) -> None:
    """With its traceback and exit code; ranks that lost a peer are witnesses."""
    with pytest.raises(RankFailedError, match="rank 1 of 3: ValueError: seven is not six") as failure:
        run_on(engine, program("fail", rank=1, how="value"), 3)
    assert (failure.value.rank, failure.value.exit_code) == (1, 3)
    assert "ValueError: seven is not six" in failure.value.rank_traceback


def tell_exit_code(engine: AbstractEngine, _folder: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 2 of 3: ended with exit code 7") as failure:
        run_on(engine, program("fail", rank=2, how="exit"), 3)
    assert failure.value.exit_code == 7


def name_killed_rank(engine: AbstractEngine, folder: Path) -> None:
    """The others, which notice nothing, are ended too, and are not blamed for it."""
    pids: dict[int, int] = {}

    def kill_one(pipe: Path) -> None:
        os.kill(_note(pids, read_pids(pipe, 3))[1], signal.SIGKILL)

    is_named = pytest.raises(RankFailedError, match="rank 1 of 3: ended by SIGKILL")
    with _use_other_hand(folder, kill_one) as pipe, is_named:
        run_on(engine, program("wait_for_signal", pipe=pipe), 3)
    assert not any(map(is_running, pids.values()))


def kept_log(folder: Path, rank: int) -> str:
    log = folder / "logs" / f"rank-{rank}.log"
    return log.read_text() if log.exists() else ""


def keep_logs(engine: AbstractEngine, folder: Path) -> None:
    """Of every rank; the error has the end of the log of the rank that failed."""
    with pytest.raises(RankFailedError, match="rank 1 of 2: ended with exit code 1") as failure:
        run_on(engine, program("print_and_fail", rank=1), 2, logs=folder / "logs")
    assert "rank 1 begins\n  the disk is full" in str(failure.value)
    assert kept_log(folder, 1) == "rank 1 begins\nthe disk is full\n"
    first = kept_log(folder, 0)
    assert first.startswith("rank 0 begins\n")
    # A launcher may end it before it can tell more.
    assert first == "rank 0 begins\n" or first.endswith("PeerLostError: rank 1 is lost\n")


def show_and_keep_rank_0(engine: AbstractEngine, folder: Path) -> None:
    """What it prints and its last words are shown, once, and are in its log; the error does not repeat them."""
    with use_output_to(folder / "shown"), pytest.raises(RankFailedError, match="rank 0 of 2: ended with") as failure:
        run_on(engine, program("print_and_fail", rank=0), 2, logs=folder / "logs")
    assert "the disk is full" not in str(failure.value)
    shown, kept = (folder / "shown").read_text(), kept_log(folder, 0)
    assert kept == "rank 0 begins\nthe disk is full\n"
    assert all(shown.count(line) == 1 for line in kept.splitlines())
    assert "rank 1 begins" not in shown


def pass_interrupt_on(engine: AbstractEngine, folder: Path) -> None:
    """Ctrl-C reaches rank 0, the first that is still there; a rank that stops well has a result."""
    with _use_other_hand(folder, lambda pipe: _interrupt_self(read_pids(pipe, 2))) as pipe:
        results = run_on(engine, program("stop_all_when_interrupted", pipe=pipe, folder=str(folder)), 2)
    assert results == ["interrupted", "told"]


def tell_interrupt(engine: AbstractEngine, folder: Path) -> None:
    """Ranks that end because of Ctrl-C are no failure."""
    pids: dict[int, int] = {}

    def interrupt(pipe: Path) -> None:
        _interrupt_self(_note(pids, read_pids(pipe, 2)))

    with _use_other_hand(folder, interrupt) as pipe, pytest.raises(KeyboardInterrupt):
        run_on(engine, program("wait_for_signal", pipe=pipe), 2)
    assert not any(map(is_running, pids.values()))


def end_at_second_interrupt(engine: AbstractEngine, folder: Path) -> None:
    """Also ranks that survive the first."""
    pids: dict[int, int] = {}

    def interrupt_twice(pipe: Path) -> None:
        _interrupt_self(_note(pids, read_pids(pipe, 2)))
        assert read_pids(pipe, 1) == {0: pids[0]}
        _interrupt_self(pids)

    with _use_other_hand(folder, interrupt_twice) as pipe, pytest.raises(KeyboardInterrupt):
        run_on(engine, program("survive_interrupts", pipe=pipe), 2)
    assert not any(map(is_running, pids.values()))


CHECKS: tuple[Check, ...] = (
    give_results,
    tell_cause,
    tell_exit_code,
    name_killed_rank,
    keep_logs,
    show_and_keep_rank_0,
    pass_interrupt_on,
    tell_interrupt,
    end_at_second_interrupt,
)


@contextmanager
def use_output_to(file: Path) -> Iterator[None]:
    """What this process and those that it starts print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        for descriptor, number in zip(before, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(target)


@contextmanager
def _use_other_hand(folder: Path, act: Callable[[Path], Any]) -> Iterator[str]:
    """A pipe over which ranks check in, and a thread that acts when they have, while the main one waits for them."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    thread = threading.Thread(target=act, args=(pipe,))
    thread.start()
    try:
        yield str(pipe)
    finally:
        thread.join(DEADLINE_SECONDS)


def _note(pids: dict[int, int], found: dict[int, int]) -> dict[int, int]:
    pids.update(found)
    return found


def _interrupt_self(_pids: dict[int, int]) -> None:
    os.kill(os.getpid(), signal.SIGINT)
