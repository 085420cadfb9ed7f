"""The optimizers that a recipe can name, with their options."""

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.errors import RecipeError, nearest
from weft.training.optimizers.adagrad import AdaGrad
from weft.training.optimizers.adam import Adam, AdamW
from weft.training.optimizers.layer_wise import LAMB, LARS
from weft.training.optimizers.optimizer import AbstractOptimizer
from weft.training.optimizers.rmsprop import RMSProp
from weft.training.optimizers.rule_optimizer import Optimizer
from weft.training.optimizers.sgd import SGD, Momentum, Nesterov
from weft.training.optimizers.torch_optimizer import TorchOptimizer

__all__ = ["OPTIMIZERS"]


def _sgd(*, lr: float = 0.1, weight_decay: float = 0.0) -> AbstractOptimizer:
    return Optimizer(SGD(weight_decay), lr=lr)


def _momentum(
    *, lr: float = 0.1, momentum: float = 0.9, dampening: float = 0.0, weight_decay: float = 0.0
) -> AbstractOptimizer:
    return Optimizer(Momentum(momentum, dampening, weight_decay), lr=lr)


def _nesterov(*, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> AbstractOptimizer:
    return Optimizer(Nesterov(momentum, weight_decay), lr=lr)


def _adam(
    *, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> AbstractOptimizer:
    return Optimizer(Adam(beta1, beta2, eps, weight_decay), lr=lr)


def _adamw(
    *, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> AbstractOptimizer:
    return Optimizer(AdamW(beta1, beta2, eps, weight_decay), lr=lr)


def _adagrad(
    *,
    lr: float = 0.01,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_sum: float = 0.0,
    eps: float = 1e-10,
) -> AbstractOptimizer:
    return Optimizer(AdaGrad(lr_decay, weight_decay, initial_sum, eps), lr=lr)


def _rmsprop(
    *,
    lr: float = 0.01,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
) -> AbstractOptimizer:
    return Optimizer(RMSProp(alpha, eps, weight_decay, momentum, centered), lr=lr)


def _lars(
    *, lr: float = 1.0, momentum: float = 0.9, trust: float = 0.001, weight_decay: float = 0.0
) -> AbstractOptimizer:
    return Optimizer(LARS(momentum, trust, weight_decay), lr=lr)


def _lamb(
    *, lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01
) -> AbstractOptimizer:
    return Optimizer(LAMB(beta1, beta2, eps, weight_decay), lr=lr)


def _torch(*, name: str, lr: float | None = None, options: str = "") -> AbstractOptimizer:
    """A class of torch.optim, its own `lr` unless one is given, and further options written as in a call."""
    classes = {
        n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    if name not in classes or name == "Optimizer":
        raise RecipeError(f"torch.optim has no such optimizer ({name}); {nearest(name, classes)}")
    parameters = inspect.signature(classes[name]).parameters
    known, given = parameters.keys() - {"params", "lr"}, _parse_call(options)
    unknown = given.keys() - known
    if unknown:
        raise RecipeError(f"unknown option of torch.optim.{name} ({min(unknown)}); {nearest(min(unknown), known)}")
    return TorchOptimizer(classes[name], lr=parameters["lr"].default if lr is None else lr, **given)


def _parse_call(text: str) -> dict[str, Any]:
    """The arguments of a call: `rho=0.9, betas=(0.9, 0.99)`."""
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)) or call.args:
            raise ValueError("only name=value is understood")
        return {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, TypeError, ValueError) as error:
        cure = "write them as in a call: --set 'optimizer.options=rho=0.9, eps=1e-6'"
        raise RecipeError(f"options cannot be read ({text!r}); {cure}") from error


OPTIMIZERS: Mapping[str, Callable[..., AbstractOptimizer]] = {
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
    "lamb": _lamb,
    "lars": _lars,
    "momentum": _momentum,
    "nesterov": _nesterov,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "torch": _torch,
}
