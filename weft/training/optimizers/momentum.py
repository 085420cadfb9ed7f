"""An optimizer without its momentum, for ranks that keep the momentum of their gradients themselves."""

from typing import NamedTuple

from weft.errors import PlanError
from weft.training.optimizers.optimizer import AbstractOptimizer
from weft.training.optimizers.rule_optimizer import Optimizer
from weft.training.optimizers.sgd import SGD, Momentum, Nesterov

__all__ = ["WithoutMomentum", "split_momentum"]


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
        case Momentum(dampening=0.0):
            return WithoutMomentum(Optimizer(SGD(rule.weight_decay), lr=optimizer.lr), rule.momentum)
        case Nesterov():
            rest = Optimizer(SGD(rule.weight_decay), lr=optimizer.lr)
            return WithoutMomentum(rest, rule.momentum, is_nesterov=True)
    name = type(optimizer if rule is None else rule).__name__
    raise PlanError(
        f"ranks keep the momentum of gradients themselves, and this optimizer is another (optimizer: {name}); "
        "use sgd, momentum or nesterov, or compress=topk"
    )
