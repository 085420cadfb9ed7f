"""Kinds of layers whose gradient of a weight is a function of the layer's input x and the gradient dy of its output.

    linear        y = x W^T + b     dx = dy W        dW = dy^T x       W: (outputs, inputs)
    transposed    y = x W + b       dx = dy W^T      dW = x^T dy       W: (inputs, outputs), as Hugging Face has it
    convolution   y = x * W + b     by autograd      dW = x * dy

Whoever keeps x and dy may make that gradient later (pipeline/put_off.py), or with the rows of other ranks (layers.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LayerKind", "as_rows", "is_free", "kind_of"]


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer, as functions of a layer and tensors.

    Args:
        forward: of layer, x, weight, bias.
        to_weight: of layer, x, dy, and the sum so far, to which the gradient is added in place; None for none.
        to_bias: of layer and dy.
        to_input: of dy and weight; None where rows of x and dy are no factors of the gradient.
        is_transposed: weights are (inputs, outputs).
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    to_weight: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    to_bias: Callable[[Any, Tensor], Tensor]
    to_input: Callable[[Tensor, Tensor], Tensor] | None = None
    is_transposed: bool = False


def kind_of(layer: nn.Module) -> LayerKind | None:
    """By class: a subclass may have another forward. None for any other layer."""
    kind = KINDS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if kind is _CONVOLUTION and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return None
    return kind


def is_free(layer: Any) -> bool:
    """Whether a layer has the forward of its class, and something to train."""
    bias = layer.bias
    return "forward" not in vars(layer) and (layer.weight.requires_grad or (bias is not None and bias.requires_grad))


def as_rows(x: Tensor) -> Tensor:
    """Samples, times positions where there are some."""
    return x.reshape(-1, x.shape[-1])


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a.mm(b) if total is None else total.addmm_(a, b)


def _linear(_layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _to_linear(_layer: nn.Module, x: Tensor, dy: Tensor, total: Tensor | None) -> Tensor:
    return _add_product(total, as_rows(dy).t(), as_rows(x))


def _to_last(_layer: nn.Module, dy: Tensor) -> Tensor:
    return as_rows(dy).sum(0)


def _through_linear(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.matmul(weight)


def _transposed(_layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.t(), bias)


def _to_transposed(_layer: nn.Module, x: Tensor, dy: Tensor, total: Tensor | None) -> Tensor:
    return _add_product(total, as_rows(x).t(), as_rows(dy))


def _through_transposed(dy: Tensor, weight: Tensor) -> Tensor:
    return dy.matmul(weight.t())


def _settings(layer: Any) -> tuple[Any, ...]:
    nothing = [0] * len(layer.kernel_size)
    return layer.stride, layer.padding, layer.dilation, False, nothing, layer.groups


def _convolution(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() == weight.dim():
        return torch.convolution(x, weight, bias, *_settings(layer))
    return torch.convolution(x.unsqueeze(0), weight, bias, *_settings(layer)).squeeze(0)


def _to_convolution(layer: Any, x: Tensor, dy: Tensor, total: Tensor | None) -> Tensor:
    if x.dim() < layer.weight.dim():
        x, dy = x.unsqueeze(0), dy.unsqueeze(0)
    given = (dy, x, layer.weight.detach(), None, *_settings(layer))
    gradient: Tensor = torch.ops.aten.convolution_backward(*given, [False, True, False])[1]
    return gradient if total is None else total.add_(gradient)


def _to_channels(layer: Any, dy: Tensor) -> Tensor:
    return as_rows(dy.movedim(1 - layer.weight.dim(), -1)).sum(0)


_LINEAR = LayerKind(_linear, _to_linear, _to_last, _through_linear)
_TRANSPOSED = LayerKind(_transposed, _to_transposed, _to_last, _through_transposed, is_transposed=True)
_CONVOLUTION = LayerKind(_convolution, _to_convolution, _to_channels)

KINDS: Mapping[str, LayerKind] = {
    "torch.nn.modules.linear.Linear": _LINEAR,
    "transformers.pytorch_utils.Conv1D": _TRANSPOSED,
    "torch.nn.modules.conv.Conv1d": _CONVOLUTION,
    "torch.nn.modules.conv.Conv2d": _CONVOLUTION,
    "torch.nn.modules.conv.Conv3d": _CONVOLUTION,
}
"""By class; a subclass may have another forward."""
