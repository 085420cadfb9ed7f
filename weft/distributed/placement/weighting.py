"""Gradients weighted before backward, for layers in which samples of several replicas meet.

    forward     outputs --[ scale_gradient ]--> loss        the identity: losses and predictions stay as they are
    backward    w * g   <-[       * w      ]--  g           and all gradients behind it count with the rank's weight

A placement with such a layer (experts, linear layers) holds a `Weighting`, gives it as its `weighting`, and wraps the
loss with `weigh_loss` in `execute`; the exchange then adds gradients up as they are. In a script the outputs of the
model are scaled instead, by `weigh_outputs`.
"""

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from weft.graph import Loss
from weft.training.weighting import Weighting

__all__ = ["ScaleGradient", "Weighting", "scale_gradient", "weigh_loss", "weigh_outputs"]


@final
class ScaleGradient(Function):
    """The identity, whose gradient is multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # 0 times infinite would be no 0 on the other ranks.
        return gradient * ctx.weight if ctx.weight else gradient.new_zeros(gradient.shape), None


def scale_gradient(values: Any, weight: float) -> Any:
    """The same values, tensors in any structure, whose gradients are multiplied by the weight."""

    def scale(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        scaled: Tensor = ScaleGradient.apply(tensor, weight)  # type: ignore[no-untyped-call]
        return scaled

    return values if weight == 1.0 else tree_map_only(Tensor, scale, values)


def weigh_loss(loss: Loss, weighting: Weighting) -> Loss:
    """The loss, whose gradient counts with the weight that is set when it is computed."""

    def weighed(predictions: Tensor, *targets: Tensor) -> Tensor:
        return loss(scale_gradient(predictions, weighting.value), *targets)

    return weighed


def weigh_outputs(weighting: Weighting, weight: Callable[[], float]) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Hooks for a script's model, before and after its forward: the replica's weight is asked for, and its outputs get
    it."""

    def before(_module: nn.Module, _inputs: Any) -> None:
        weighting.replica = weight()

    def after(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        return scale_gradient(outputs, weighting.value)

    return before, after
