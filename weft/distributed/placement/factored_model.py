"""The whole model on every rank, with layers that keep factors of their gradients (`compress=factors`).

Gradients are weighted before backward (weighting.py): rows of several micro-batches are appended to each other, and
each has the weight of its own when it comes.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.placement.weighting import Weighting, weigh_loss
from weft.errors import PlanError
from weft.graph import AbstractExecutor, EagerExecutor, Loss
from weft.specs import Axis
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.placement import AbstractPlacement, MakeExecutor, WholeModel

__all__ = ["FactoredModel"]


@final
class FactoredModel(AbstractPlacement):
    """As the whole model, but for its layers.

    Args:
        factors: which finds the layers, and gives their rows to the exchange.
    """

    def __init__(self, factors: FactoredLayers) -> None:
        self._factors = factors
        self._whole = WholeModel()
        self._weighting = Weighting()

    def place(self, module: nn.Module) -> nn.Module:
        names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
        self._factors.find([module], names)
        return module

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        executor = make(module, weigh_loss(loss, self._weighting))
        if not isinstance(executor, EagerExecutor):
            raise PlanError(
                f"a captured graph multiplies factors itself, and none are left to send "
                f"(executor: {type(executor).__name__}, plan: compress=factors); use executor=eager"
            )
        return executor

    @property
    def has_loss(self) -> bool:
        return True

    @property
    def weighting(self) -> Weighting:
        return self._weighting

    @property
    def takes_forwards_together(self) -> bool:
        """Ranks meet in backward alone."""
        return False

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        return self._whole.reduced_over(name)

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return parameters

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return self._whole.prepare(optimizer, parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._whole.take_over(optimizer, parameters)

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def cut_of(self, name: str) -> None:
        """All of everything."""

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        return self._whole.norm(norms)
