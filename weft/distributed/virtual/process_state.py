"""The process-state seam: what a process has once, and every virtual rank for itself."""

from abc import ABC, abstractmethod
from typing import Any, final

import torch

from weft.graph.executors.random_state import get_random_state, set_random_state

__all__ = ["AbstractProcessState", "RandomState"]


class AbstractProcessState(ABC):
    """Taken from the process when a rank gives its turn away, and put back when it has it again. A rank begins with
    that of the caller, and may then change it as a process of its own would."""

    @abstractmethod
    def take(self) -> Any:
        """The state as it is now."""

    @abstractmethod
    def put(self, state: Any) -> None:
        """Go on with a state that was taken."""


@final
class RandomState(AbstractProcessState):
    """The generators of torch, on the CPU and on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> torch.Tensor:
        return get_random_state(self._device)

    def put(self, state: torch.Tensor) -> None:
        set_random_state(state, self._device)
