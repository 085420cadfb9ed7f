"""The steps seam: what a worker does with the servers in a step of its own."""

from abc import ABC, abstractmethod

from weft.graph import GradientSink
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["AbstractSteps"]


class AbstractSteps(ABC):
    """`start` once all shards have let this rank go, then for each step `begin` and `finish`."""

    @abstractmethod
    def start(self) -> None:
        """A training begins, or goes on from a checkpoint."""

    @property
    @abstractmethod
    def number(self) -> int:
        """Of the step to take: a share of a batch where work is dealt out, else a batch."""

    @abstractmethod
    def begin(self, weight: float) -> GradientSink:
        """A sink for gradients that count with `weight`."""

    @abstractmethod
    def finish(self, update: Update) -> OptimizerState:
        """All gradients are here: exchange, and update where that is done by the rank itself."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What the exchange of the last step cost."""
