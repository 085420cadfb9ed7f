"""Gradients by finite differences, with a step that fits the type the function is evaluated in.

A central difference errs by h^2 (truncation) and eps / h (rounding), so the best step is eps^(1/3) of the size of x
and the error is of the order of eps^(2/3): 4e-11 in float64, 2e-5 in float32. A step of 1e-5 in float32, whatever x is,
gives noise. Where an operator runs in float64 it is evaluated there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Derivative", "derivatives", "difference_tolerance"]

MAX_ELEMENTS = 64  # of one input; of larger ones this many are chosen at random

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Derivative:
    """Of the weighted sum of one output, by some elements of one input."""

    output: int
    input: int
    elements: Tensor  # positions in the flattened input
    values: Tensor  # float64


def difference_tolerance(dtype: torch.dtype) -> float:
    """The relative error that differences evaluated in this type may have."""
    return 100 * float(torch.finfo(dtype).eps ** (2 / 3))


def derivatives(
    function: Function, inputs: Sequence[Any], weights: Sequence[Tensor | None], *, generator: torch.Generator
) -> list[Derivative]:
    """d(sum(weight * output)) / d(input) for every pair of a weighted output and a floating-point input.

    Args:
        function: pure; evaluated in the type of `inputs`.
        weights: one for each output, in its shape; None for an output without a gradient.
    """
    found = []
    for i, value in enumerate(inputs):
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            continue
        elements = torch.randperm(value.numel(), generator=generator)[:MAX_ELEMENTS].sort().values
        slopes = [_slopes(function, inputs, i, int(element), weights) for element in elements]
        for output, weight in enumerate(weights):
            if weight is not None:
                values = torch.tensor([slope[output] for slope in slopes], dtype=torch.float64)
                found.append(Derivative(output, i, elements, values))
    return found


def _slopes(
    function: Function, inputs: Sequence[Any], i: int, element: int, weights: Sequence[Tensor | None]
) -> list[float]:
    """The derivative of every output by one element."""
    original: Tensor = inputs[i]
    x = float(original.flatten()[element])
    step = torch.finfo(original.dtype).eps ** (1 / 3) * max(abs(x), 1.0)
    sides, points = [], []
    for moved in (x + step, x - step):
        changed = original.clone(memory_format=torch.contiguous_format)
        changed.view(-1)[element] = moved
        points.append(float(changed.view(-1)[element]))  # what the type could hold
        sides.append(function(*inputs[:i], changed, *inputs[i + 1 :]))
    width = points[0] - points[1]
    # Subtracted element by element before the sum: what does not depend on x leaves no rounding behind.
    return [
        0.0 if weight is None else float(((upper.double() - lower.double()) * weight.double()).sum()) / width
        for upper, lower, weight in zip(*sides, weights, strict=True)
    ]
