"""Which rank this process is, and how it meets the others: told by whoever started it, in the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.errors import UsageError

__all__ = ["Place", "find_place"]

Starter = Literal["nobody", "weft", "torchrun", "mpirun"]


@dataclass(frozen=True)
class Place:
    """A process's place among the ranks of a run."""

    starter: Starter
    rank: int = 0
    size: int = 1
    meeting: str = ""  # a folder for Weft's own ranks; host:port for torchrun's; nothing for MPI's, who have met
    local_size: int = 1  # ranks on this host

    @property
    def is_one_host(self) -> bool:
        return self.local_size == self.size


def find_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Read the place from the variables that `weft run`, torchrun and Open MPI set; one rank if there are none.

    >>> find_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "2"})
    Place(starter='torchrun', rank=1, size=2, meeting='h:1', local_size=2)
    """
    if "WEFT_RANK" in environment:
        rank, size = _numbers(environment, "WEFT_RANK", "WEFT_SIZE")
        return Place("weft", rank, size, environment["WEFT_MEETING"], size)
    if "RANK" in environment and "WORLD_SIZE" in environment and "MASTER_ADDR" in environment:
        rank, size, local_size = _numbers(environment, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        meeting = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}"
        return Place("torchrun", rank, size, meeting, local_size)
    if "OMPI_COMM_WORLD_RANK" in environment:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        rank, size, local_size = _numbers(environment, *names)
        return Place("mpirun", rank, size, "", local_size)
    return Place("nobody")


def _numbers(environment: Mapping[str, str], *names: str) -> list[int]:
    try:
        return [int(environment[name]) for name in names]
    except (KeyError, ValueError) as error:
        raise UsageError(f"environment does not say which rank this is ({error}); start it with weft run") from None
