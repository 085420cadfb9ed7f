"""A rule over all parameters."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import AbstractOptimizer, AbstractRule, OptimizerState, Scope, Shared
from weft.training.optimizers.plain_rule import check_between

__all__ = ["Optimizer"]


@final
class Optimizer(AbstractOptimizer):
    """Runs a rule for every parameter that has a gradient.

    >>> from weft.training.optimizers import SGD
    >>> weights, optimizer = {"w": torch.tensor([1.0])}, Optimizer(SGD(), lr=0.5)
    >>> state = optimizer.update({"w": torch.tensor([1.0])}, weights, optimizer.init(weights), optimizer.lr)
    >>> weights["w"].item(), state.shared.step.item()
    (0.5, 1.0)
    """

    def __init__(self, rule: AbstractRule, *, lr: float) -> None:
        check_between(0, math.inf, lr=lr)
        self._rule = rule
        self._lr = lr

    @property
    def lr(self) -> float:
        return self._lr

    @property
    def scope(self) -> Scope:
        return self._rule.scope

    @property
    def rule(self) -> AbstractRule:
        return self._rule

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        shared = Shared(lr=torch.tensor(self._lr, dtype=torch.float64), step=torch.zeros((), dtype=torch.float64))
        return OptimizerState(shared, {n: self._rule.initial_slots(p.detach()) for n, p in parameters.items()})

    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        shared = self._rule.new_input(state.shared)
        points = {n: self._rule.prepare_param(p, state.slots.get(n, {}), shared) for n, p in parameters.items()}
        return parameters if all(points[n] is p for n, p in parameters.items()) else points

    @torch.no_grad()
    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
    ) -> OptimizerState:
        given = Shared(lr=torch.tensor(lr, dtype=torch.float64), step=state.shared.step)
        shared, slots = self._rule.new_input(given), dict(state.slots)
        for name, parameter in parameters.items():
            gradient = gradients.get(name)
            if gradient is not None:
                value, slots[name] = self._rule.update_rule(gradient, parameter, slots.get(name, {}), shared)
                parameter.copy_(value)
        return OptimizerState(shared, slots)
