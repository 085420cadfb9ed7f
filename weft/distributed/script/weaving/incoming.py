"""Gradients scaled as a backward hands them over, before they are added to what is there.

A loss that is a sum, a batch of which this rank has nothing, a backward whose exchange comes later: each changes how
much one backward counts. What earlier ones have left in `grad` is not touched.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from weft.distributed.script.data.batch_share import BatchShare
from weft.torch_private import number_of_backward

__all__ = ["IncomingGradients", "Loss", "RoundWeight", "StepWeight", "factor_of_loss", "is_incoming"]

Loss = Literal["mean", "sum"]
"""Over the items of a batch, as a script computes it."""


def factor_of_loss(loss: Loss, weight: float) -> float:
    """By which a rank's gradient is multiplied to be one of a mean; 0 where the rank has no part in the batch.

    A sum over a share of w is w times as large as that over the batch:  sum_r w_r (g_r / w_r) = sum_r g_r.

    >>> factor_of_loss("mean", 0.25), factor_of_loss("sum", 0.25), factor_of_loss("sum", 0.0)
    (1.0, 4.0, 0.0)
    """
    if not weight:
        return 0.0
    return 1.0 if loss == "mean" else 1.0 / weight


def _have_no_gradient(parameters: Sequence[Tensor]) -> bool:
    return all(parameter.grad is None for parameter in parameters)


@final
class IncomingGradients:
    """Multiplies the gradients of each backward by one factor; kept alive by its hooks.

    Args:
        find_factor: called once in every backward, when its first gradient is there.
    """

    def __init__(self, parameters: Iterable[Tensor], find_factor: Callable[[], float]) -> None:
        self._find_factor = find_factor
        self._backward = -1
        self._factor = 1.0
        for parameter in parameters:
            parameter.register_hook(self._scale)

    def _scale(self, gradient: Tensor | None) -> Tensor | None:
        number = number_of_backward()
        if number != self._backward:
            self._backward, self._factor = number, self._find_factor()
        if gradient is None or self._factor == 1.0:  # None where a layer keeps rows, which have been scaled
            return None
        # Of a sample that does not count nothing may come through, be it infinite.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)


def is_incoming(hook: Any) -> bool:
    """Whether a hook of a parameter is one of IncomingGradients."""
    return isinstance(getattr(hook, "__self__", None), IncomingGradients)


@final
class StepWeight:
    """The share with which a step counts whose rank, or server, updates with its gradient alone: the mean of those of
    its backward calls.

    Args:
        parameters: those that the step updates. Where none has a gradient left, what earlier calls gave was thrown
            away, as that of an adversary's loss is, and does not count.
    """

    def __init__(self, share: BatchShare, loss: Loss, parameters: Sequence[Tensor]) -> None:
        self._share = share
        self._loss = loss
        self._parameters = parameters
        self._weights: list[float] = []

    def factor(self) -> float:
        if self._weights and _have_no_gradient(self._parameters):
            self._weights = []
        self._weights.append(self._share.weight)
        return factor_of_loss(self._loss, self._share.weight)

    def take(self) -> float:
        """That of the step which is taken now; 0 if no backward counted."""
        weights, self._weights = self._weights, []
        return sum(weights) / len(weights) if weights else 0.0


@final
class RoundWeight:
    """The share with which a step counts that is added to those of other ranks. Backward calls whose shares differ
    count each with its own:  w_1 (g_1 + (w_2 / w_1) g_2) = w_1 g_1 + w_2 g_2.

    Args:
        parameters: as of StepWeight.
    """

    def __init__(self, share: BatchShare, loss: Loss, parameters: Sequence[Tensor]) -> None:
        self._share = share
        self._loss = loss
        self._parameters = parameters
        self._first = 0.0

    def factor(self) -> float:
        weight = self._share.weight
        if self._first and _have_no_gradient(self._parameters):
            self._first = 0.0
        self._first = self._first or weight
        scale = 1.0 if weight == self._first or not weight else weight / self._first
        return scale * factor_of_loss(self._loss, weight)

    def take(self) -> float:
        """That of the step which is taken now; 0 if no backward counted."""
        weight, self._first = self._first, 0.0
        return weight
