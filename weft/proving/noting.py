"""An optimizer that notes the gradients it is given: what ranks have agreed on, before a rule makes much of little."""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.training.optimizers import AbstractOptimizer, AbstractOptimizerWrapper, OptimizerState, WholeNorms

__all__ = ["GRADIENT", "NotingOptimizer"]

GRADIENT = "gradient"
"""The slot under which a gradient is shown: it lies across ranks as slots do."""


@final
class NotingOptimizer(AbstractOptimizerWrapper):
    """Wraps any optimizer."""

    def __init__(self, inner: AbstractOptimizer) -> None:
        super().__init__(inner)
        self._gradients: dict[str, Tensor] = {}

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        self._gradients = {name: g.detach().clone() for name, g in gradients.items() if g is not None}
        return self._inner.update(gradients, parameters, state, lr, whole_norms)

    def show(self, state: OptimizerState) -> OptimizerState:
        """The state, with the gradients of the last update beside the slots."""
        names = state.slots.keys() | self._gradients.keys()
        noted = {name: {GRADIENT: self._gradients[name]} if name in self._gradients else {} for name in names}
        return replace(state, slots={name: {**state.slots.get(name, {}), **noted[name]} for name in names})
