"""The process of one rank: it calls the rank program of a folder and leaves its result or failure there.

python -m weft.engines.rank_process FOLDER     with WEFT_RANK, WEFT_SIZE, WEFT_MEETING, WEFT_STARTER in the environment
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from weft.atomic import write_json
from weft.engines.rank_program import INTERRUPTED, Failure, RankProgram, has_kept_logs, log_of, mark_process
from weft.engines.tee import keep_output
from weft.errors import PeerLostError, WeftError

__all__ = ["be_rank", "die_with_parent", "run_rank"]


def be_rank(folder: Path, rank: int) -> int:
    """Run the program; returns the exit code. What it prints goes to the rank's log; of rank 0 it is shown, and goes to
    a log too where logs are kept."""
    mark_process(folder, rank)
    _name_process(f"weft-rank-{rank}")
    if rank > 0:
        log = os.open(log_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    elif has_kept_logs(folder):
        keep_output(log_of(folder, rank))
    return run_rank(folder, rank)


def run_rank(folder: Path, rank: int) -> int:
    """Call the program and leave its result or failure; returns the exit code."""
    try:
        write_json(folder / f"result-{rank}.json", RankProgram.read(folder).call())
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        exit_code = error.exit_code if isinstance(error, WeftError) else 3
        failure = Failure(
            rank,
            time.time(),
            type(error).__name__,
            str(error),
            traceback.format_exc(),
            exit_code,
            isinstance(error, PeerLostError),
        )
        write_json(folder / f"failure-{rank}.json", asdict(failure))
        return exit_code
    return 0


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
