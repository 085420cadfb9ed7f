"""An optimizer without its momentum, for ranks that keep the momentum of their gradients themselves.

Momentum is linear: with weight decay it is that of the gradients, which ranks keep, and beside it that of the decay,
which is the same on all ranks and is not sent.

    dense     v <- m v + g + c w                                w <- w - lr v
    here      u <- m u + g  on a rank;   d <- m d + c w         w <- w - lr (sum of what is sent of u  +  d)

A velocity d that begins as a dense v goes on as it would have.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from weft.errors import PlanError
from weft.training.optimizers.optimizer import AbstractOptimizer, AbstractRule, Shared, Slots
from weft.training.optimizers.plain_rule import AbstractPlainRule, descend
from weft.training.optimizers.rule_optimizer import Optimizer
from weft.training.optimizers.sgd import SGD, Momentum, Nesterov

__all__ = ["MomentumOfDecay", "WithoutMomentum", "split_momentum"]


@final
@dataclass(frozen=True)
class MomentumOfDecay(AbstractPlainRule):
    """d <- momentum d + weight_decay w;  w <- w - lr (g + d), or with Nesterov's momentum
    w <- w - lr (g + weight_decay w + momentum d)"""

    momentum: float
    weight_decay: float
    is_nesterov: bool = False

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {"velocity": torch.zeros_like(parameter)}

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        velocity = (slots["velocity"] * self.momentum).add(parameter, alpha=self.weight_decay)
        if self.is_nesterov:
            direction = gradient.add(parameter, alpha=self.weight_decay).add(velocity, alpha=self.momentum)
        else:
            direction = gradient + velocity
        return descend(parameter, direction, shared.lr), {"velocity": velocity}


class WithoutMomentum(NamedTuple):
    """The rest of an optimizer, and the momentum that it had."""

    optimizer: AbstractOptimizer
    momentum: float
    is_nesterov: bool = False


def split_momentum(optimizer: AbstractOptimizer) -> WithoutMomentum:
    """Of stochastic gradient descent, with whatever momentum.

    Raises:
        PlanError: of any other optimizer, or one that dampens gradients.

    >>> split_momentum(Optimizer(Momentum(0.9), lr=0.1)).momentum
    0.9
    """
    rule = optimizer.rule if isinstance(optimizer, Optimizer) else None
    match rule:
        case SGD():
            return WithoutMomentum(optimizer, 0.0)
        case Momentum(dampening=0.0) | Nesterov():
            is_nesterov = isinstance(rule, Nesterov)
            rest = _rest_of(rule.momentum, rule.weight_decay, is_nesterov)
            return WithoutMomentum(Optimizer(rest, lr=optimizer.lr), rule.momentum, is_nesterov)
    name = type(optimizer if rule is None else rule).__name__
    raise PlanError(
        f"ranks keep the momentum of gradients themselves, and this optimizer is another (optimizer: {name}); "
        "use sgd, momentum or nesterov, or compress=topk"
    )


def _rest_of(momentum: float, weight_decay: float, is_nesterov: bool) -> AbstractRule:
    if momentum and weight_decay:
        return MomentumOfDecay(momentum, weight_decay, is_nesterov)
    return SGD(weight_decay)
