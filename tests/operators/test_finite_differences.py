"""Finite differences with a step that fits the type."""

import pytest
import torch
from torch import Tensor

from weft.operators.finite_differences import MAX_ELEMENTS, derivatives, difference_tolerance


def slopes_of(function, *inputs: Tensor | float, weights: list[Tensor | None]):  # type: ignore[no-untyped-def]
    return derivatives(function, inputs, weights, generator=torch.Generator().manual_seed(0))


# Deep500's check took a step of 1e-5 in float32, for x = 300 less than the distance to the next number, and called an
# exact gradient of x^2 wrong by 600.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_square_at_small_and_large_values(dtype: torch.dtype) -> None:
    x = torch.tensor([1.5, 20.0, 300.0], dtype=dtype)
    (slope,) = slopes_of(lambda x: (x * x,), x, weights=[torch.ones(3, dtype=dtype)])
    error = ((slope.values - 2 * x.double()) / (2 * x.double())).abs().max()
    assert error < difference_tolerance(dtype)


def test_every_output_by_every_input() -> None:
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    weights: list[Tensor | None] = [torch.rand(2, 3).double(), None, torch.rand(()).double()]
    found = slopes_of(lambda a, k, b: (k * a * b, a > 0, b.exp().sum()), a, 3.0, b, weights=weights)
    assert [(slope.output, slope.input) for slope in found] == [(0, 0), (2, 0), (0, 2), (2, 2)]
    assert weights[0] is not None and weights[2] is not None
    expected = [3 * weights[0] * b, torch.zeros(2, 3), (3 * weights[0] * a).sum(0), weights[2] * b.exp()]
    for slope, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(slope.values, wanted.double().flatten(), rtol=1e-8, atol=1e-8)


def test_a_large_input_is_sampled_and_inputs_stay() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    kept = x.clone()
    (slope,) = slopes_of(lambda x: (x.sin(),), x, weights=[torch.ones(1000)])
    assert len(slope.elements) == MAX_ELEMENTS == len(set(slope.elements.tolist()))
    torch.testing.assert_close(slope.values, x.cos()[slope.elements])
    assert torch.equal(x, kept)


def test_an_empty_input_has_no_slopes() -> None:
    (slope,) = slopes_of(lambda x: (x * 2,), torch.empty(0, 3), weights=[torch.empty(0, 3)])
    assert slope.values.numel() == 0
