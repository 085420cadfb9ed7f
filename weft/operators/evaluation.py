"""An operator called in the ways its checks need: in float64, with its gradients, against what it should give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.operators.operator import Operator

__all__ = ["Truth", "as_outputs", "call", "call_with_gradients", "find_truth", "in_float64", "make_weights"]

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Truth:
    """A function whose outputs, or finite differences, those of an operator are compared with."""

    label: str
    function: Callable[..., Outputs]
    dtype: torch.dtype | None  # floating-point inputs are given in this type; None: as they are

    def outputs(self, inputs: Sequence[Any]) -> Outputs:
        return self.function(*self.prepare(inputs))

    def prepare(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return in_float64(inputs) if self.dtype == torch.float64 else tuple(inputs)


def find_truth(operator: Operator, inputs: Sequence[Any]) -> tuple[Truth | None, Truth]:
    """The truth for outputs (None: there is nothing better than the operator itself), and the truth for finite
    differences: the operator itself, in float64 where it can be."""
    own = Truth("itself", lambda *values: call(operator, values), None)
    shadow = Truth("itself in float64", own.function, torch.float64)
    reference = operator.definition.reference
    given = None
    if reference is not None:
        given = Truth("reference", lambda *values: as_outputs(reference(*values)), torch.float64)
    if all(not output.is_floating_point() or output.dtype == torch.float64 for output in _attempt(shadow, inputs)):
        return given or shadow, shadow
    return given, given or own


def _attempt(truth: Truth, inputs: Sequence[Any]) -> Outputs:
    """Outputs, or one of another type where the operator refuses float64."""
    try:
        with torch.no_grad():
            return truth.outputs(inputs)
    except Exception:
        return (torch.empty(0, dtype=torch.float32),)


def in_float64(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Floating-point tensors, and only those, in float64."""
    return tuple(
        value.double() if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs
    )


def call(operator: Operator, inputs: Sequence[Any]) -> Outputs:
    return as_outputs(operator(*inputs))


def as_outputs(result: Any) -> Outputs:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def make_weights(outputs: Outputs, generator: torch.Generator) -> list[Tensor | None]:
    """Random weights far from zero for every output that can have a gradient."""
    return [
        (torch.rand(output.shape, generator=generator) + 0.5).to(output.dtype) if output.is_floating_point() else None
        for output in outputs
    ]


def call_with_gradients(
    operator: Operator, inputs: Sequence[Any], weights: Sequence[Tensor | None]
) -> tuple[Outputs, dict[int, Tensor]]:
    """Outputs, and the gradient of their weighted sum by every floating-point input; outputs of weight None are
    left out."""
    values = [
        value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in inputs
    ]
    wanted = {i: value for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad}
    outputs = call(operator, values)
    pairs = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if weight is not None]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs], list(wanted.values()), [weight for _, weight in pairs], allow_unused=True
    )
    found = {
        i: torch.zeros_like(value) if gradient is None else gradient
        for (i, value), gradient in zip(wanted.items(), gradients, strict=True)
    }
    return tuple(output.detach() for output in outputs), found
