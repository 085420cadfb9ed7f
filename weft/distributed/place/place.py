"""The place seam: who this process is among those of a run, and how it reaches the others."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from weft.distributed.group.clock import VirtualTimes
from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.liveness import Store
from weft.distributed.mailbox import AbstractMailbox
from weft.specs import CPU, Plan
from weft.training.optimizers import AbstractOptimizer

__all__ = ["AbstractPlace"]

Shared = TypeVar("Shared")


class AbstractPlace(ABC):
    """A process of a run, real or virtual, and the device it computes on. A plan is realised on it (realise.py).

    Servers and responders, which stand beside ranks, keep what they hold in host memory.

    Args:
        objects: where objects are kept that addresses of one process share.
    """

    def __init__(self, objects: dict[str, Any], device: torch.device = CPU) -> None:
        self._objects = objects
        self._device = device

    @final
    @property
    def device(self) -> torch.device:
        """Where the rank of this process has its model and its data."""
        return self._device

    @property
    @abstractmethod
    def rank(self) -> int:
        """The number of this process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Processes in all."""

    @property
    @abstractmethod
    def patience(self) -> float:
        """Seconds to wait for an answer that must come, if nobody is known to be lost."""

    @property
    @abstractmethod
    def snapshots(self) -> Path | None:
        """A folder from which a server that died is restored; None where nobody would start it again."""

    @abstractmethod
    def size_for(self, plan: Plan) -> int:
        """Processes that a plan needs on places of this kind."""

    @abstractmethod
    def addresses(self, plan: Plan) -> tuple[int, ...]:
        """The addresses of a plan's roles that this process plays."""

    @abstractmethod
    def open_group(self, plan: Plan) -> AbstractGroup:
        """The group of all ranks, with the collectives that the plan's topology names, for tensors of the CPU and of
        this place's device. A collective call."""

    @abstractmethod
    def open_world(self, num_ranks: int) -> AbstractGroup | None:
        """A group of the first `num_ranks` processes, apart from any plan's, for tensors of the CPU; None in a process
        that is not one of them. Called once, by all processes."""

    @abstractmethod
    def open_ranks(self, plan: Plan) -> AbstractGroup | None:
        """The group of all ranks of a plan that has other processes beside them, for tensors of the CPU and of this
        place's device; None in a process that is no rank. Called once, by all processes."""

    @abstractmethod
    def open_notes(self) -> Store | None:
        """Where ranks leave notes for each other beside their groups; None where time is virtual, and nobody could read
        them while another waits. Called once, by all processes."""

    @abstractmethod
    def open_mailbox(self, plan: Plan, address: int) -> AbstractMailbox:
        """The mailbox of one of this process's addresses."""

    @abstractmethod
    def charge_updates(self, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        """The optimizer of a server that holds this part of all elements; where time is virtual, its updates take
        some."""

    @property
    def times(self) -> VirtualTimes | None:
        """Of computation, where time is virtual; None where it takes its own."""
        return None

    @final
    def shared(self, name: str, make: Callable[[], Shared]) -> Shared:
        """An object for all addresses of one process, made when it is first asked for."""
        if name not in self._objects:
            self._objects[name] = make()
        found: Shared = self._objects[name]
        return found

    @abstractmethod
    def mark_joined(self) -> None:
        """The others know this rank from now on, and will hear of its death."""
