"""Ranks that one command starts and keeps together, such as mpirun or torchrun."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from weft.engines.engine import STRICT, AbstractRanks, End, Tolerance
from weft.engines.guarded_rank import read_end
from weft.engines.rank_program import has_result, read_process
from weft.errors import UsageError
from weft.secret import SECRET_VARIABLE, find_secret

__all__ = ["CommandRanks", "start_command"]

GRACE_SECONDS = 5.0


def start_command(
    command: Sequence[str], folder: Path, num_ranks: int, *, variable: str, num_threads: int
) -> "CommandRanks":
    """Start the command, which runs `-m weft.engines.guarded_rank FOLDER VARIABLE` on so many ranks.

    Args:
        command: up to the arguments of Python.
        variable: that in which the command tells each process its rank.
        num_threads: threads of each rank.
    """
    environment = {
        **os.environ,
        SECRET_VARIABLE: find_secret(folder).hex(),
        "WEFT_STARTER": str(os.getpid()),
        "OMP_NUM_THREADS": str(num_threads),
    }
    # A session of its own, so that the terminal's Ctrl-C reaches this process alone, which passes it on.
    process = subprocess.Popen(
        [*command, "-m", "weft.engines.guarded_rank", str(folder), variable],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return CommandRanks(process, folder, num_ranks)


@final
class CommandRanks(AbstractRanks):
    """The ranks of a command, which ends all of them when one fails."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, num_ranks: int) -> None:
        self._process = process
        self._folder = folder
        self._num_ranks = num_ranks

    def wait(self, tolerance: Tolerance) -> list[End]:
        if tolerance != STRICT:
            raise UsageError("only weft itself starts ranks again or goes on without one; start them with weft run")
        code = self._process.wait()
        ends = [end for rank in range(self._num_ranks) if (end := read_end(self._folder, rank))]
        if not any(end.code for end in ends):  # then nothing but the command can be why a rank has no result
            missing = [rank for rank in range(self._num_ranks) if not has_result(self._folder, rank)]
            known = {end.rank for end in ends}
            ends += [End(rank, code, time.time()) for rank in missing if rank not in known]
        return ends

    def interrupt(self, *, everyone: bool) -> None:
        processes = {rank: read_process(self._folder, rank) for rank in range(self._num_ranks)}
        there = [p for rank, p in processes.items() if p is not None and read_end(self._folder, rank) is None]
        for process in there if everyone else there[:1]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)
        if not there:
            self._process.send_signal(signal.SIGINT)  # no rank is there yet

    def end(self) -> None:
        """The command ends its ranks if it can; a guard ends its rank if the command cannot."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for rank in range(self._num_ranks):
            process = read_process(self._folder, rank)
            if process is not None:
                _wait_for_end(process)


def _wait_for_end(process: int) -> None:
    """Wait for a process that is not our child."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(1000 * GRACE_SECONDS)
        finally:
            os.close(descriptor)
