"""Comparison of tensors within what a type can hold, and the element where they differ most."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Comparison", "compare_tensors", "rounding_tolerance"]

# Roundings that a result may be away from the exact one. Those of 16 bits are summed in 32 and rounded once.
ROUNDINGS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 64, torch.float64: 64}


def rounding_tolerance(dtype: torch.dtype) -> float:
    """The largest relative error of a right result; 0 for integers."""
    return ROUNDINGS.get(dtype, 64) * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@dataclass(frozen=True)
class Comparison:
    """The worst element: |actual - expected| / (|expected| + root mean square of expected)."""

    error: float
    tolerance: float
    where: str  # empty where all is well

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def compare_tensors(actual: Tensor, expected: Tensor, tolerance: float) -> Comparison:
    """Compare shapes and every element, in float64. Infinities and not-a-numbers must stand in the same places.

    >>> compare_tensors(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), 1e-6).where
    'at [1]: 2.5 instead of 2; 1 of 2 elements differ'
    """
    if actual.shape != expected.shape:
        where = f"shape {list(actual.shape)} instead of {list(expected.shape)}"
        return Comparison(math.inf, tolerance, where)
    if not expected.numel():
        return Comparison(0.0, tolerance, "")
    got, wanted = actual.detach().double(), expected.detach().double()
    errors = _errors(got, wanted)
    error = float(errors.max())
    if error <= tolerance:
        return Comparison(error, tolerance, "")
    place = int(errors.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(place), expected.shape)]
    values = f"{float(got.flatten()[place]):.6g} instead of {float(wanted.flatten()[place]):.6g}"
    count = int((errors > tolerance).sum())
    return Comparison(error, tolerance, f"at {index}: {values}; {count} of {errors.numel()} elements differ")


def _errors(got: Tensor, wanted: Tensor) -> Tensor:
    finite = wanted[wanted.isfinite()]
    level = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    errors = (got - wanted).abs() / (wanted.abs() + (level or 1.0))
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    return torch.where(same, 0.0, torch.where(got.isfinite() & wanted.isfinite(), errors, math.inf))
