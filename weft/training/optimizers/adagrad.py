"""AdaGrad (Duchi, Hazan and Singer, 2011), in its diagonal form."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import Shared, Slots
from weft.training.optimizers.plain_rule import AbstractPlainRule, add_decay, check_between, descend_by_ratio

__all__ = ["AdaGrad"]


@final
@dataclass(frozen=True)
class AdaGrad(AbstractPlainRule):
    """s <- s + g^2 (element by element);  w <- w - lr / (1 + (step - 1) lr_decay) g / (sqrt(s) + eps)"""

    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_sum: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_between(0, math.inf, lr_decay=self.lr_decay, weight_decay=self.weight_decay)
        check_between(0, math.inf, initial_sum=self.initial_sum, eps=self.eps)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"sum_of_squares": torch.full_like(parameter, self.initial_sum)}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        total = slots["sum_of_squares"].addcmul(gradient, gradient)
        lr = shared.lr / (1 + (shared.step - 1) * self.lr_decay)
        parameter = descend_by_ratio(parameter, gradient, total.sqrt() + self.eps, lr)
        return parameter, {"sum_of_squares": total}
