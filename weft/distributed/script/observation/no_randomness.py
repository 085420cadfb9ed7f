"""A script without its random numbers: each is its mean, so that what is left of a difference has another cause.

    dropout(x)                       x
    randn, randn_like, normal_       the mean: 0, or as given
    rand, rand_like                  1/2
    bernoulli(p)                     p

Numbers that choose (randint, randperm, multinomial) stay: samplers and targets are made of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["NoRandomness", "turn_off_dropout", "use_no_randomness"]


def _first(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _attend(*args: Any, **kwargs: Any) -> Any:
    kwargs = {**kwargs, "dropout_p": 0.0}
    return F.scaled_dot_product_attention(*args[:4], **kwargs)


def _normal(mean: Any, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Any:
    if isinstance(mean, Tensor):
        return mean.clone()
    if isinstance(std, Tensor):
        return torch.full_like(std, mean)
    return torch.full(size, float(mean), **_known(kwargs))


def _known(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _filled(make: Callable[..., Tensor], value: float) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: make(*args, **_known(kwargs)).fill_(value)


DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
MEANS: Mapping[Any, Callable[..., Any]] = {
    **{getattr(F, name): _first for name in DROPOUTS},
    **{getattr(torch, name): _first for name in ("dropout", "dropout_", "alpha_dropout", "feature_dropout")},
    F.scaled_dot_product_attention: _attend,
    torch.randn: _filled(torch.zeros, 0.0),
    torch.rand: _filled(torch.zeros, 0.5),
    torch.randn_like: _filled(torch.zeros_like, 0.0),
    torch.rand_like: _filled(torch.zeros_like, 0.5),
    torch.normal: _normal,
    torch.bernoulli: lambda x, *args, **kwargs: x.clone(),
    Tensor.bernoulli: lambda x, *args, **kwargs: x.clone(),
    Tensor.normal_: lambda x, mean=0.0, std=1.0, **kwargs: x.fill_(mean),
    Tensor.uniform_: lambda x, low=0.0, high=1.0, **kwargs: x.fill_((low + high) / 2),
    Tensor.bernoulli_: lambda x, p=0.5, **kwargs: x.copy_(p) if isinstance(p, Tensor) else x.fill_(p),
}


class NoRandomness(TorchFunctionMode):
    """A mode of torch for the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return MEANS.get(func, func)(*args, **(kwargs or {}))


def use_no_randomness() -> None:
    """From now on, in this thread."""
    mode: Any = NoRandomness()
    mode.__enter__()


def turn_off_dropout(model: nn.Module) -> None:
    """Layers whose dropout is inside one kernel: recurrent ones, and attention."""
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
