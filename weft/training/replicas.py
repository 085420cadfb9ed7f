"""The replicas seam: what the loop needs of the other ranks, and the one rank that needs nobody.

A step as the loop drives it, on every rank:

    share      which samples of the global batch are this rank's
    begin      a sink for this rank's gradients; exchange starts while backward still runs
    finish     all gradients exchanged, parameters updated; the global loss
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from weft.graph import GradientSink, State
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState

__all__ = ["AbstractReplicas", "SoloReplicas", "Traffic", "Update"]


@dataclass(frozen=True)
class Update:
    """What to do with the gradients once they are exchanged."""

    optimizer: AbstractOptimizer
    parameters: Mapping[str, Tensor]
    state: OptimizerState
    lr: float
    clip_norm: float | None

    def apply(self, gradients: Mapping[str, Tensor | None]) -> OptimizerState:
        if self.clip_norm is not None:
            # In the model's order, not in that of arrival: the norm of the norms has the same bits on every path.
            gradients = clip_by_norm({name: gradients.get(name) for name in self.parameters}, self.clip_norm)
        return self.optimizer.update(gradients, self.parameters, self.state, self.lr)


@dataclass(frozen=True)
class Traffic:
    """What the exchange of one step cost this rank."""

    exposed: float = 0.0  # seconds that the rank waited
    hidden: float = 0.0  # seconds that messages were under way while it computed
    num_bytes: int = 0  # handed to the transport


class AbstractReplicas(ABC):
    """The ranks that train one model together. Every method is called by all ranks, in the same order."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def join(self, model: State) -> None:
        """Begin together: every rank leaves with the parameters and buffers of rank 0, in place."""

    @abstractmethod
    def share(self, indices: Tensor) -> Tensor:
        """This rank's part of a global batch."""

    @abstractmethod
    def begin(self, weight: float) -> GradientSink:
        """Start a step in which this rank's gradients count with `weight`; the weights of all ranks sum to 1."""

    @abstractmethod
    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        """Wait for the exchange and update; `loss` is this rank's, already weighted, the one returned is the sum.

        No parameter is written if the sum is not finite: every rank sees the same sum and stops.
        """

    @abstractmethod
    def traffic(self) -> Traffic:
        """The cost of the last step's exchange."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in rank order: counts, tallies, decisions. For small tensors."""

    @abstractmethod
    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Every rank's tensor, in rank order, on every rank."""

    @abstractmethod
    def collect(self, state: OptimizerState) -> OptimizerState:
        """The whole optimizer state on every rank, where ranks keep parts of it; what a checkpoint holds."""

    @abstractmethod
    def align(self, buffers: Mapping[str, Tensor]) -> None:
        """Bring buffers (running statistics) together before they are evaluated or saved, in place."""


@final
class SoloReplicas(AbstractReplicas):
    """One rank: nothing is shared, exchanged or waited for."""

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor | None] = {}

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def join(self, model: State) -> None:
        pass

    def share(self, indices: Tensor) -> Tensor:
        return indices

    def begin(self, weight: float) -> GradientSink:
        self._gradients = {}
        return self._gradients.__setitem__

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        gradients, self._gradients = self._gradients, {}
        return loss, update.apply(gradients) if math.isfinite(loss) else update.state

    def traffic(self) -> Traffic:
        return Traffic()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def collect(self, state: OptimizerState) -> OptimizerState:
        return state

    def align(self, buffers: Mapping[str, Tensor]) -> None:
        pass
