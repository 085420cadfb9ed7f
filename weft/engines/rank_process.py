"""The process of one rank: it calls the rank program of a folder and leaves its result or failure there.

python -m weft.engines.rank_process FOLDER     with WEFT_RANK, WEFT_SIZE, WEFT_MEETING, WEFT_STARTER in the environment
"""

import ctypes
import io
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from weft.atomic import write_json
from weft.engines.failure import describe
from weft.engines.rank_program import INTERRUPTED, RankProgram, log_of, mark_process, stream_of

__all__ = ["be_rank", "die_with_parent", "run_rank"]


def be_rank(folder: Path, rank: int) -> int:
    """Run the program; returns the exit code. What rank 0 prints is shown, what others print goes to their logs; either
    may go through the launcher, which does both."""
    mark_process(folder, rank)
    _name_process(f"weft-rank-{rank}")
    _use_output(folder, rank)
    return run_rank(folder, rank)


def run_rank(folder: Path, rank: int) -> int:
    """Call the program and leave its result or failure; returns the exit code."""
    try:
        write_json(folder / f"result-{rank}.json", RankProgram.read(folder).call())
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        sys.last_value = error  # as Python does, for what still runs when the process ends
        failure = describe(error, rank)
        write_json(folder / f"failure-{rank}.json", asdict(failure))
        return failure.exit_code
    return 0


def _use_output(folder: Path, rank: int) -> None:
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        path = stream_of(folder, rank, "out" if number == 1 else "err")
        if not path.exists():
            if rank == 0:
                continue
            path = log_of(folder, rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what others wait to read does not wait in here


def die_with_parent(parent: int) -> None:
    """No orphan: the kernel ends this process when the one that started it is gone, however it went (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # gone already
            os._exit(1)


def _name_process(name: str) -> None:
    """The name that ps and top show: forked ranks have the command line of their server (Linux)."""
    if sys.platform == "linux":
        Path("/proc/self/comm").write_text(name)


if __name__ == "__main__":
    die_with_parent(int(os.environ["WEFT_STARTER"]))
    sys.exit(be_rank(Path(sys.argv[1]), int(os.environ["WEFT_RANK"])))
