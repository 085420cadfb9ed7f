"""A rule over all parameters."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.layer_rule import AbstractLayerRule, norms_here
from weft.training.optimizers.optimizer import (
    AbstractOptimizer,
    AbstractRule,
    OptimizerState,
    Scope,
    Shared,
    Slots,
    WholeNorms,
)
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
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        given = Shared(lr=torch.tensor(lr, dtype=torch.float64), step=state.shared.step)
        shared, slots = self._rule.new_input(given), dict(state.slots)
        found = {name: g for name in parameters if (g := gradients.get(name)) is not None}
        if isinstance(self._rule, AbstractLayerRule) and whole_norms is not None:
            self._update_pieces(self._rule, found, parameters, slots, shared, whole_norms)
            return OptimizerState(shared, slots)
        for name, gradient in found.items():
            value, slots[name] = self._rule.update_rule(gradient, parameters[name], slots.get(name, {}), shared)
            parameters[name].copy_(value)
        return OptimizerState(shared, slots)

    @staticmethod
    def _update_pieces(
        rule: AbstractLayerRule,
        gradients: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        slots: dict[str, Slots],
        shared: Shared,
        whole_norms: WholeNorms,
    ) -> None:
        """All drafts first, so that one message brings the norms of all."""
        drafts = {name: rule.draft(g, parameters[name], slots.get(name, {}), shared) for name, g in gradients.items()}
        norms = whole_norms({name: norms_here(parameters[name], draft) for name, draft in drafts.items()})
        for name in gradients:
            value, slots[name] = rule.scale(parameters[name], drafts.pop(name), norms[name], shared)
            parameters[name].copy_(value)
