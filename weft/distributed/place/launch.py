"""How this process was started: which rank it is, and how it finds the others, as its environment tells."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.errors import UsageError

__all__ = ["Launch", "find_launch"]

Launcher = Literal["nobody", "weft", "hosts", "torchrun", "mpirun"]
"""`hosts` is `weft launch` on each of several hosts; `weft` is one on this host alone."""

# Variables that other launchers set on every rank, and who sets them.
UNKNOWN_LAUNCHERS = {
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "srun"),
    "PMI_RANK": ("PMI_SIZE", "an MPI or process manager that speaks PMI"),
    "PMIX_RANK": ("PMIX_SIZE", "a process manager that speaks PMIx"),
}


@dataclass(frozen=True)
class Launch:
    """A process among those of a run.

    Args:
        meeting: a folder for ranks that Weft started on one host; host:port for those on several and for torchrun's;
            nothing for MPI's, who have met.
        local_size: processes on this host.
        local_rank: which of them this one is: of several devices of its host, the one that it takes.
    """

    launcher: Launcher
    rank: int = 0
    size: int = 1
    meeting: str = ""
    local_size: int = 1
    local_rank: int = 0

    @property
    def is_one_host(self) -> bool:
        return self.local_size == self.size


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the variables that `weft run`, torchrun and Open MPI set; one rank if there are none.

    Raises:
        UsageError: a launcher that Weft does not know started several ranks, which would each train alone.

    >>> there = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    >>> find_launch({**there, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"})
    Launch(launcher='torchrun', rank=3, size=4, meeting='h:1', local_size=2, local_rank=1)
    """
    if "WEFT_RANK" in environment:
        rank, size = _numbers(environment, "WEFT_RANK", "WEFT_SIZE")
        if "WEFT_RENDEZVOUS" in environment:
            local_size, local_rank = _numbers(environment, "WEFT_LOCAL_SIZE", "WEFT_LOCAL_RANK")
            return Launch("hosts", rank, size, environment["WEFT_RENDEZVOUS"], local_size, local_rank)
        return Launch("weft", rank, size, environment["WEFT_MEETING"], size, rank)
    if "RANK" in environment and "WORLD_SIZE" in environment and "MASTER_ADDR" in environment:
        rank, size, local_size = _numbers(environment, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        (local_rank,) = _numbers({"LOCAL_RANK": str(rank % local_size), **environment}, "LOCAL_RANK")
        meeting = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}"
        return Launch("torchrun", rank, size, meeting, local_size, local_rank)
    if "OMPI_COMM_WORLD_RANK" in environment:
        of_world = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_SIZE", "LOCAL_RANK")]
        rank, size, local_size, local_rank = _numbers(environment, *of_world)
        return Launch("mpirun", rank, size, "", local_size, local_rank)
    _check_alone(environment)
    return Launch("nobody")


def _check_alone(environment: Mapping[str, str]) -> None:
    for rank, (size, who) in UNKNOWN_LAUNCHERS.items():
        # PMIx tells no size: that a rank is not the first tells that there are others.
        if rank in environment and (environment[rank] != "0" or environment.get(size, "1") != "1"):
            numbers = f"{rank}: {environment[rank]}, {size}: {environment.get(size, 'not set')}"
            cure = "start them with weft run --workers, torchrun or Open MPI's mpirun, or unset these variables"
            raise UsageError(f"ranks were started by {who}, which Weft does not know ({numbers}); {cure}")


def _numbers(environment: Mapping[str, str], *names: str) -> list[int]:
    try:
        return [int(environment[name]) for name in names]
    except (KeyError, ValueError) as error:
        raise UsageError(f"environment does not say which rank this is ({error}); start it with weft run") from None
