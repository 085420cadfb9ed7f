"""Optimizers: rules as pure functions on tensors, and torch.optim as it is."""

from weft.training.optimizers.adagrad import AdaGrad
from weft.training.optimizers.adam import Adam, AdamW
from weft.training.optimizers.catalogue import OPTIMIZERS
from weft.training.optimizers.layer_rule import AbstractLayerRule
from weft.training.optimizers.layer_wise import LAMB, LARS
from weft.training.optimizers.momentum import WithoutMomentum, split_momentum
from weft.training.optimizers.optimizer import (
    AbstractOptimizer,
    AbstractRule,
    OptimizerState,
    Scope,
    Shared,
    Slots,
    WholeNorms,
    slots_beside,
)
from weft.training.optimizers.plain_rule import AbstractPlainRule
from weft.training.optimizers.rmsprop import RMSProp
from weft.training.optimizers.rule_optimizer import Optimizer
from weft.training.optimizers.sgd import SGD, Momentum, Nesterov
from weft.training.optimizers.torch_optimizer import TorchOptimizer
from weft.training.optimizers.wrapper import AbstractOptimizerWrapper

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "AbstractLayerRule",
    "AbstractOptimizer",
    "AbstractOptimizerWrapper",
    "AbstractPlainRule",
    "AbstractRule",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Momentum",
    "Nesterov",
    "Optimizer",
    "OptimizerState",
    "RMSProp",
    "Scope",
    "Shared",
    "Slots",
    "TorchOptimizer",
    "WholeNorms",
    "WithoutMomentum",
    "slots_beside",
    "split_momentum",
]
