"""RMSProp (Tieleman and Hinton, 2012), optionally centred (Graves, 2013) and with momentum."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import Shared, Slots
from weft.training.optimizers.plain_rule import (
    AbstractPlainRule,
    add_decay,
    check_between,
    descend,
    descend_by_ratio,
)

__all__ = ["RMSProp"]


@final
@dataclass(frozen=True)
class RMSProp(AbstractPlainRule):
    """s <- alpha s + (1 - alpha) g^2;  w <- w - lr g / (sqrt(s) + eps)

    Centred, the root is of the variance: s less the square of the gradient's own running mean.
    """

    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def __post_init__(self) -> None:
        check_between(0, 1, alpha=self.alpha, momentum=self.momentum)
        check_between(0, math.inf, eps=self.eps, weight_decay=self.weight_decay)

    def initial_slots(self, parameter: Tensor) -> Slots:
        used = {"mean_square": True, "mean": self.centered, "velocity": self.momentum > 0}
        return {name: torch.zeros_like(parameter) for name, is_used in used.items() if is_used}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        mean_square = (slots["mean_square"] * self.alpha).addcmul(gradient, gradient, value=1 - self.alpha)
        after, spread = {"mean_square": mean_square}, mean_square
        if self.centered:
            after["mean"] = mean = slots["mean"].lerp(gradient, 1 - self.alpha)
            spread = mean_square.addcmul(mean, mean, value=-1)
        denominator = spread.sqrt() + self.eps
        if not self.momentum:
            return descend_by_ratio(parameter, gradient, denominator, shared.lr), after
        after["velocity"] = velocity = (slots["velocity"] * self.momentum).addcdiv(gradient, denominator)
        return descend(parameter, velocity, shared.lr), after
