"""Layer-wise adaptive rules for large batches: LARS (You et al., 2017) and LAMB (You et al., 2020)."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.training.optimizers.layer_rule import AbstractLayerRule, Draft, trust_ratio
from weft.training.optimizers.optimizer import Shared, Slots
from weft.training.optimizers.plain_rule import check_between, descend

__all__ = ["LAMB", "LARS"]


@final
@dataclass(frozen=True)
class LARS(AbstractLayerRule):
    """v <- momentum v + lr trust |w| / (|g| + weight_decay |w|) (g + weight_decay w);  w <- w - v"""

    momentum: float = 0.9
    trust: float = 0.001
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_between(0, math.inf, weight_decay=self.weight_decay, trust=self.trust)
        check_between(0, 1, momentum=self.momentum)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"velocity": torch.zeros_like(parameter)}

    def draft(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> Draft:
        return Draft(gradient, slots)

    def scale(self, parameter: Tensor, draft: Draft, norms: Tensor, shared: Shared) -> tuple[Tensor, Slots]:
        weight, gradient = norms.unbind()
        is_usable = (weight > 0) & (gradient > 0)
        ratio = self.trust * weight / (gradient + self.weight_decay * weight)
        rate = shared.lr * torch.where(is_usable, ratio, torch.ones_like(ratio)).cpu()
        direction = draft.direction.add(parameter, alpha=self.weight_decay) if self.weight_decay else draft.direction
        velocity = (draft.slots["velocity"] * self.momentum).addcmul(direction, rate.to(parameter))
        return parameter - velocity, {"velocity": velocity}


@final
@dataclass(frozen=True)
class LAMB(AbstractLayerRule):
    """r = m' / (sqrt(v') + eps) + weight_decay w;  w <- w - lr |w| / |r| r, with Adam's moments m and v."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_between(0, 1, beta1=self.beta1, beta2=self.beta2)
        check_between(0, math.inf, eps=self.eps, weight_decay=self.weight_decay)

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"first_moment": torch.zeros_like(parameter), "second_moment": torch.zeros_like(parameter)}

    def draft(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> Draft:
        first = slots["first_moment"].lerp(gradient, 1 - self.beta1)
        second = (slots["second_moment"] * self.beta2).addcmul(gradient, gradient, value=1 - self.beta2)
        correction1, correction2 = 1 - self.beta1**shared.step, 1 - self.beta2**shared.step
        denominator = second.sqrt() / correction2.sqrt().to(second) + self.eps
        direction = first / correction1.to(first) / denominator
        if self.weight_decay:
            direction = direction.add(parameter, alpha=self.weight_decay)
        return Draft(direction, {"first_moment": first, "second_moment": second})

    def scale(self, parameter: Tensor, draft: Draft, norms: Tensor, shared: Shared) -> tuple[Tensor, Slots]:
        rate = shared.lr * trust_ratio(*norms.unbind()).cpu()
        return descend(parameter, draft.direction, rate), draft.slots
