"""Gradients of weights put off: backward gives what another stage waits for, and the rest is computed later.

    forward     y = x W + b              to autograd W and b are constants; x is kept
    backward    dy -> dx                 dy is kept
    later       dW += x^T dy, db += dy   one product, which adds to the sum over micro-batches as it is made

Linear layers and convolutions are put off, as they hold most of a model and make most of its work. Parameters of all
other layers get their gradients in backward, and so do these under autocast, which would change the type of x, and
where another placement has given them a forward of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import UsageError

__all__ = ["Grow", "Postponement", "PutOff"]

Grow = Callable[[Tensor | None], Tensor]
"""From the sum of a parameter's gradients so far to the one with another gradient."""


@dataclass(frozen=True)
class _Kind:
    """A kind of layer, as functions of a layer and tensors.

    Args:
        forward: of layer, x, weight, bias.
        to_weight: of layer, x, dy, and the sum so far.
        to_bias: of layer and dy.
    """

    forward: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    to_weight: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    to_bias: Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class _Use:
    """One call of a layer whose weight waits for its gradient."""

    layer: nn.Module
    kind: _Kind
    x: Tensor
    version: int  # of x, which nobody may write until it is used
    dy: Tensor

    def gradients(self) -> Iterator[tuple[Tensor, Grow]]:
        """Parameters of the layer that are trained, each with how its gradient grows."""
        if self.x._version != self.version:
            what = f"layer: {type(self.layer).__name__}, shape: {list(self.x.shape)}"
            raise UsageError(
                f"input of a layer was changed in place before the gradient of its weight was made ({what}); "
                "compute a new tensor, or use schedule=1f1b"
            )
        weight: Any = self.layer.weight
        bias: Any = self.layer.bias
        if weight.requires_grad:
            yield weight, partial(self.kind.to_weight, self.layer, self.x, self.dy)
        if bias is not None and bias.requires_grad:
            yield bias, self._grow_bias

    def _grow_bias(self, total: Tensor | None) -> Tensor:
        gradient = self.kind.to_bias(self.layer, self.dy)
        return gradient if total is None else total.add_(gradient)


@final
@dataclass
class PutOff:
    """The gradients that one micro-batch's passage through a chunk of layers still has to make."""

    uses: list[_Use] = field(default_factory=list)

    def make(self, names: Mapping[int, str]) -> Iterator[tuple[str, Grow]]:
        """The gradients, in the order of backward, each when it is asked for; its memory is let go with the next.

        Args:
            names: of parameters, by id.
        """
        uses, self.uses = self.uses[::-1], []
        while uses:
            for parameter, grow in uses.pop().gradients():
                yield names[id(parameter)], grow


@final
class Postponement:
    """The layers of a module whose weights can wait; looked for once, as a step has many passes."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [(layer, kind) for layer in module.modules() if (kind := _kind_of(layer)) is not None]

    @contextmanager
    def use(self, into: PutOff) -> Iterator[None]:
        """While it is held, forward passes of the module put the gradients of weights off."""
        changed = [(vars(layer), layer, kind) for layer, kind in self._layers if _is_free(layer)]
        for own, layer, kind in changed:
            own["forward"] = partial(_forward, layer, kind, into)
        try:
            yield
        finally:
            for own, _, _ in changed:
                del own["forward"]


def _forward(layer: Any, kind: _Kind, into: PutOff, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if not x.requires_grad or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return kind.forward(layer, x, weight, bias)
    y = kind.forward(layer, x, weight.detach(), None if bias is None else bias.detach())
    kept, version = x.detach(), x._version
    y.register_hook(lambda dy: into.uses.append(_Use(layer, kind, kept, version, dy)))
    return y


def _kind_of(layer: nn.Module) -> _Kind | None:
    kind = KINDS.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if kind is _CONVOLUTION and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        return None
    return kind


def _is_free(layer: Any) -> bool:
    """Whether a layer has the forward of its class, and something to train."""
    bias = layer.bias
    return "forward" not in vars(layer) and (layer.weight.requires_grad or (bias is not None and bias.requires_grad))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a.mm(b) if total is None else total.addmm_(a, b)


def _linear(_layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _to_linear(_layer: nn.Module, x: Tensor, dy: Tensor, total: Tensor | None) -> Tensor:
    return _add_product(total, _rows(dy).t(), _rows(x))


def _to_last(_layer: nn.Module, dy: Tensor) -> Tensor:
    return _rows(dy).sum(0)


def _transposed(_layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.t(), bias)


def _to_transposed(_layer: nn.Module, x: Tensor, dy: Tensor, total: Tensor | None) -> Tensor:
    return _add_product(total, _rows(x).t(), _rows(dy))


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
    return _rows(dy.movedim(1 - layer.weight.dim(), -1)).sum(0)


_LINEAR, _TRANSPOSED = _Kind(_linear, _to_linear, _to_last), _Kind(_transposed, _to_transposed, _to_last)
_CONVOLUTION = _Kind(_convolution, _to_convolution, _to_channels)

KINDS: Mapping[str, _Kind] = {
    "torch.nn.modules.linear.Linear": _LINEAR,
    "transformers.pytorch_utils.Conv1D": _TRANSPOSED,
    "torch.nn.modules.conv.Conv1d": _CONVOLUTION,
    "torch.nn.modules.conv.Conv2d": _CONVOLUTION,
    "torch.nn.modules.conv.Conv3d": _CONVOLUTION,
}
"""By class; a subclass may have another forward."""
