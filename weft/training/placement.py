"""The placement seam: the part of a model that a rank holds, computes with and updates.

    the model, as it was built        w1        b1    w2        b2       the same on every rank
    wrap       the executor through which this rank computes: the model's own, or one that keeps parts of the
               parameters, gathers each when it is needed and lets it go again, or one that runs a stage of the model
    has_loss   whether this rank's pass ends in a loss; that of a stage in the middle does not
    owned      the pieces of parameters that this rank updates: all of them, or those of its own shard
    norm       of gradients that lie in pieces on several ranks
    spread     pieces that were updated, to the ranks that compute with them

The loop asks no more than this. How gradients come to where parameters are updated, and parameters to where they are
needed, is between a placement and its exchange (weft/distributed/placement).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from weft.graph import AbstractExecutor
from weft.training.checkpoint import Cut
from weft.training.gradients import joint_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState

__all__ = ["AbstractPlacement", "WholeModel"]


class AbstractPlacement(ABC):
    """Every method that says so is called by all ranks, in the same order."""

    @abstractmethod
    def wrap(self, executor: AbstractExecutor) -> AbstractExecutor:
        """The executor of this rank's part, made from that of the whole model."""

    @property
    @abstractmethod
    def has_loss(self) -> bool:
        """Whether the loss and the predictions of a pass are on this rank. Elsewhere an executor returns a loss of
        zero, which adds nothing to the sum over ranks."""

    @abstractmethod
    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The pieces that this rank updates, as views of the parameters, by name; one that it has no piece of is left
        out."""

    @abstractmethod
    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        """Where the optimizer wants the next gradient, whole: `parameters` itself, the same object, if there. All ranks
        call it."""

    @abstractmethod
    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Let an optimizer of torch.optim, which steps when a script says so, update the pieces that this rank owns.

        Raises:
            PlanError: it needs whole tensors, and this rank does not update whole ones.
        """

    @abstractmethod
    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        """Bring the pieces that each rank owns to those that compute with them, in place; the bytes that this rank
        sent. Called for the parameters after an update, by all ranks."""

    @abstractmethod
    def cut_of(self, name: str) -> Cut | None:
        """The part that this rank holds of a checkpoint's entry (`parameter/w`, `slot/w/velocity`); None for all of
        it."""

    @abstractmethod
    def whole_state(self, state: OptimizerState) -> OptimizerState:
        """The optimizer's state of all parameters, put together from the pieces of all ranks, who all call it."""

    @abstractmethod
    def norm(self, norms: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all gradients, of which this rank's pieces have these norms. All ranks call it."""


@final
class WholeModel(AbstractPlacement):
    """The whole model on every rank, which makes every update."""

    def wrap(self, executor: AbstractExecutor) -> AbstractExecutor:
        return executor

    @property
    def has_loss(self) -> bool:
        return True

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return parameters

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return optimizer.prepare(parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """It updates every parameter as it is."""

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def cut_of(self, name: str) -> None:
        """All of everything."""

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        return state

    def norm(self, norms: Sequence[Tensor]) -> Tensor:
        return joint_norm(norms)
