"""The exchange seam: what becomes of a rank's gradients between backward and the update."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["AbstractExchange", "report_loss"]


class AbstractExchange(ABC):
    """One step after another: `begin`, `add` for every gradient as it is ready, `finish`."""

    @abstractmethod
    def begin(self, weight: float) -> None:
        """Start a step; this rank's gradients count with `weight` (all ranks' weights sum to 1)."""

    @abstractmethod
    def add(self, name: str, gradient: Tensor | None) -> None:
        """Take one gradient; None if its parameter had no part in this rank's loss."""

    @abstractmethod
    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        """As AbstractReplicas.finish. A rank without samples has added nothing and counts as zeros."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """As AbstractReplicas.traffic."""

    @abstractmethod
    def collect(self, state: OptimizerState) -> OptimizerState:
        """As AbstractReplicas.collect."""


def report_loss(
    group: AbstractGroup, loss: float, gradients: Mapping[str, Tensor | None], names: list[str]
) -> tuple[float, dict[str, bool]]:
    """The sum of the losses, and which parameters had a part in the loss of at least one rank.

    Without the second a parameter that nobody used would get a gradient of zeros, and momentum would move it.
    """
    presence = [float(gradients.get(name) is not None) for name in names]
    report = torch.tensor([loss, *presence], dtype=torch.float64)
    group.all_reduce(report)
    total, *counts = report.tolist()
    return total, {name: count > 0 for name, count in zip(names, counts, strict=True)}
