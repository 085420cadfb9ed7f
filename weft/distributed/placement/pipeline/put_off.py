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
from torch import Tensor, nn

from weft.distributed.placement.factors.layer_kinds import LayerKind, is_free, kind_of
from weft.errors import UsageError

__all__ = ["Grow", "Postponement", "PutOff"]

Grow = Callable[[Tensor | None], Tensor]
"""From the sum of a parameter's gradients so far to the one with another gradient."""


@dataclass(frozen=True)
class _Use:
    """One call of a layer whose weight waits for its gradient."""

    layer: nn.Module
    kind: LayerKind
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
        self._layers = [(layer, kind) for layer in module.modules() if (kind := kind_of(layer)) is not None]

    @contextmanager
    def use(self, into: PutOff) -> Iterator[None]:
        """While it is held, forward passes of the module put the gradients of weights off."""
        changed = [(vars(layer), layer, kind) for layer, kind in self._layers if is_free(layer)]
        for own, layer, kind in changed:
            own["forward"] = partial(_forward, layer, kind, into)
        try:
            yield
        finally:
            for own, _, _ in changed:
                del own["forward"]


def _forward(layer: Any, kind: LayerKind, into: PutOff, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if not x.requires_grad or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return kind.forward(layer, x, weight, bias)
    y = kind.forward(layer, x, weight.detach(), None if bias is None else bias.detach())
    kept, version = x.detach(), x._version
    y.register_hook(lambda dy: into.uses.append(_Use(layer, kind, kept, version, dy)))
    return y
