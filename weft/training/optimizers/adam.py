"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019)."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import Shared, Slots
from weft.training.optimizers.plain_rule import AbstractPlainRule, add_decay, check_between, descend_by_ratio

__all__ = ["Adam", "AdamW"]


@final
@dataclass(frozen=True)
class Adam(AbstractPlainRule):
    """w <- w - lr m' / (sqrt(v') + eps), with weight decay as a part of the gradient."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return _zero_moments(parameter)

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        gradient = add_decay(gradient, parameter, self.weight_decay)
        return _descend(self, gradient, parameter, slots, shared)


@final
@dataclass(frozen=True)
class AdamW(AbstractPlainRule):
    """Adam, with a decay that shrinks the parameter by lr * weight_decay and stays out of the moments."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check(self)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return _zero_moments(parameter)

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        if self.weight_decay:
            parameter = parameter * (1 - shared.lr * self.weight_decay).to(parameter)
        return _descend(self, gradient, parameter, slots, shared)


def _check(rule: Adam | AdamW) -> None:
    check_between(0, 1, beta1=rule.beta1, beta2=rule.beta2)
    check_between(0, math.inf, eps=rule.eps, weight_decay=rule.weight_decay)


def _zero_moments(parameter: Tensor) -> Slots:
    return {"first_moment": torch.zeros_like(parameter), "second_moment": torch.zeros_like(parameter)}


def _descend(
    rule: Adam | AdamW, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared
) -> tuple[Tensor, Slots]:
    first = slots["first_moment"].lerp(gradient, 1 - rule.beta1)
    second = (slots["second_moment"] * rule.beta2).addcmul(gradient, gradient, value=1 - rule.beta2)
    # In float64: in float32, 1 - 0.999**step has lost three of its seven digits at step 1.
    correction1 = 1 - rule.beta1**shared.step
    correction2 = 1 - rule.beta2**shared.step
    denominator = second.sqrt() / correction2.sqrt().to(second) + rule.eps
    parameter = descend_by_ratio(parameter, first, denominator, shared.lr / correction1)
    return parameter, {"first_moment": first, "second_moment": second}
