"""Stochastic gradient descent: plain, with momentum, with Nesterov's momentum."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import Shared, Slots
from weft.training.optimizers.plain_rule import AbstractPlainRule, add_decay, check_between, descend

__all__ = ["SGD", "Momentum", "Nesterov"]


@final
@dataclass(frozen=True)
class SGD(AbstractPlainRule):
    """w <- w - lr g"""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_between(0, math.inf, weight_decay=self.weight_decay)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        return descend(parameter, gradient, shared.lr), {}


@final
@dataclass(frozen=True)
class Momentum(AbstractPlainRule):
    """v <- momentum v + (1 - dampening) g;  w <- w - lr v.  The first gradient is not dampened."""

    momentum: float = 0.9
    dampening: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_between(0, math.inf, weight_decay=self.weight_decay)
        check_between(0, 1, momentum=self.momentum, dampening=self.dampening)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"velocity": torch.zeros_like(parameter)}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        velocity = (slots["velocity"] * self.momentum).add(gradient, alpha=1 - self.dampening)
        if self.dampening:
            velocity = torch.where(shared.step == 1, gradient, velocity)
        return descend(parameter, velocity, shared.lr), {"velocity": velocity}


@final
@dataclass(frozen=True)
class Nesterov(AbstractPlainRule):
    """v <- momentum v + g;  w <- w - lr (g + momentum v)

    The form of Sutskever et al. (2013) in which the parameters kept are the ones looked ahead to, so the gradient is
    taken at them.
    """

    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_between(0, math.inf, weight_decay=self.weight_decay)
        check_between(0, 1, momentum=self.momentum)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"velocity": torch.zeros_like(parameter)}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        velocity = slots["velocity"] * self.momentum + gradient
        direction = gradient.add(velocity, alpha=self.momentum)
        return descend(parameter, direction, shared.lr), {"velocity": velocity}
