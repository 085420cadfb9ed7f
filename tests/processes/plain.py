"""Rank programs that need no torch, so that they start at once."""

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.engines import local
from weft.engines.rank_program import RankProgram, read_process
from weft.errors import PeerLostError, UsageError


def _read(*variables: str) -> int:
    return int(next(os.environ[variable] for variable in variables if variable in os.environ))


def own_rank() -> int:
    return _read("WEFT_RANK", "RANK", "OMPI_COMM_WORLD_RANK")


def read(variable: str) -> int:
    return _read(variable)


def tell(word: str) -> dict[str, Any]:
    return {
        "word": word,
        "rank": own_rank(),
        "size": _read("WEFT_SIZE", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
        "pid": os.getpid(),
    }


def fail(rank: int, how: str) -> str:
    """One rank fails at once; the others see that it is gone, as a group would, and say so."""
    if own_rank() != rank:
        wait_for_end_of(rank)
        raise PeerLostError(f"rank {rank} is lost", rank)
    match how:
        case "value":
            raise ValueError("seven is not six")
        case "usage":
            raise UsageError("no such thing (name: x); use y")
        case "lost":
            raise PeerLostError("rank 1 is lost", 1)
        case "exit":
            sys.exit(7)
        case "exit without result":
            sys.exit(0)
        case _:
            raise AssertionError(how)


def wait_for_end_of(rank: int) -> None:
    """Return when that rank has begun, and has ended."""
    while (process := read_process(Path(sys.argv[1]), rank)) is None:
        signal.sigtimedwait([], 0.005)
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])


def tell_variables() -> dict[str, str]:
    return dict(os.environ)


def fail_each_in_its_way() -> None:
    """Rank 1 first, of its own accord; rank 0 sees that; rank 2 afterwards, of its own accord too."""
    if own_rank() == 1:
        raise KeyError("b")
    wait_for_end_of(1)
    raise PeerLostError("rank 1 is lost", 1) if own_rank() == 0 else ValueError("c")


def die(joins: bool) -> str:
    """Rank 1 is killed, before the others know it or after; they go on."""
    if joins:
        (Path(os.environ["WEFT_MEETING"]) / f"joined-{own_rank()}").touch()
    if own_rank() == 1:
        signal.raise_signal(signal.SIGKILL)
    return "done"


def print_and_fail(rank: int) -> None:
    """Every rank prints; one fails in a way that leaves nothing but its log, the others see that it is gone."""
    print(f"rank {own_rank()} begins")
    if own_rank() == rank:
        sys.exit("the disk is full")
    wait_for_end_of(rank)
    raise PeerLostError(f"rank {rank} is lost", rank)


def print_in_every_way(num_lines: int) -> None:
    for i in range(num_lines):
        print(f"line {i} of {own_rank()}")
    os.write(1, b"past python\n")
    print("to the error", file=sys.stderr)
    os.system("echo by a program")
    print("without end", end="")


def print_terminal() -> None:
    print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
    print("10%\r20%")


def print_for_ever() -> str:
    try:
        while True:
            print("a line")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return "nobody reads"


def interrupt_itself() -> None:
    signal.raise_signal(signal.SIGINT)


def check_in(pipe: str) -> None:
    """Tell the test, over its pipe, that this rank is there."""
    with open(pipe, "w") as file:
        file.write(f"{own_rank()} {os.getpid()}\n")


def wait_for_signal(pipe: str) -> None:
    """Go on until a signal ends it."""
    check_in(pipe)
    while True:
        signal.pause()


def survive_interrupts(pipe: str) -> None:
    """Check in again whenever an interrupt comes."""
    signal.signal(signal.SIGINT, lambda *_: check_in(pipe))
    wait_for_signal(pipe)


def stop_when_interrupted(pipe: str) -> str:
    """Rank 0 ends by itself; the others end well when they are interrupted."""
    asked: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    check_in(pipe)
    while own_rank() > 0 and not asked:
        signal.pause()
    return "stopped" if asked else "done"


def stop_each_when_interrupted(pipe: str) -> str:
    """Every rank ends when it is interrupted itself."""
    with suppress(KeyboardInterrupt):
        wait_for_signal(pipe)
    return "stopped"


def stop_all_when_interrupted(pipe: str, folder: str) -> str:
    """Rank 0 tells the others to stop when it is interrupted, as a training does."""
    asked: list[bool] = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    told = Path(folder) / "stop"
    check_in(pipe)
    while not asked and not told.exists():
        signal.sigtimedwait([], 0.01)
    told.touch()
    return "interrupted" if asked else "told"


if __name__ == "__main__":
    # A launcher: python -m tests.processes.plain FUNCTION RANKS PIPE
    local.GRACE_SECONDS = 0.2
    function, num_ranks, pipe = sys.argv[1:]
    try:
        print(local.run_ranks(RankProgram(f"tests.processes.plain:{function}", {"pipe": pipe}), int(num_ranks)))
    except KeyboardInterrupt:
        print("interrupted")
