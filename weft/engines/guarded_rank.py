"""A rank that a launcher such as mpirun or torchrun starts: two processes, the rank and a guard that sees how it ends.

    mpirun --- fork ---> guard --- fork ---> rank

    python -m weft.engines.guarded_rank FOLDER VARIABLE     with the rank in that variable, as the launcher sets it

The launcher knows how its processes ended, but each tells it in a way of its own. The guard leaves it in the folder of
the rank program, as `ended-RANK.json`. It ends the rank when the launcher, or the process that started the launcher
(WEFT_STARTER), is gone.
"""

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from weft.atomic import write_json
from weft.engines.engine import End
from weft.engines.rank_process import be_rank, die_with_parent

__all__ = ["guard", "read_end"]


def guard(folder: Path, rank: int, process: int) -> int:
    """Wait for the rank's process and note its end; returns the exit code."""

    def end_rank(_signal: int, _frame: FrameType | None) -> None:
        """The launcher ends all ranks: this is no end of the rank's own, and there is nothing to note."""
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_rank)
    poll = select.poll()
    for other in (process, os.getppid(), int(os.environ["WEFT_STARTER"])):
        try:
            poll.register(os.pidfd_open(other), select.POLLIN)
        except ProcessLookupError:
            os.kill(process, signal.SIGKILL)
    poll.poll()
    if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        os.kill(process, signal.SIGKILL)  # the launcher is gone
    moment = time.time()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    write_json(folder / f"ended-{rank}.json", {"code": code, "moment": moment})
    return code if code >= 0 else 128 - code


def read_end(folder: Path, rank: int) -> End | None:
    """How a rank ended, if it has ended by itself."""
    file = folder / f"ended-{rank}.json"
    return End(rank, **json.loads(file.read_text())) if file.is_file() else None


def main(folder: Path, variable: str) -> int:
    rank, own = int(os.environ[variable]), os.getpid()
    process = os.fork()
    if process == 0:
        die_with_parent(own)
        return be_rank(folder, rank)
    return guard(folder, rank, process)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
