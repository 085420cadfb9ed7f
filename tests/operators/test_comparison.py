"""Comparisons of tensors: what passes, what does not, and where."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.operators.comparison import compare_tensors, rounding_tolerance

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        ([1.0, INF, NAN, 0.0], [1.0, INF, NAN, -0.0], True),
        ([1.0, INF], [1.0, -INF], False),
        ([1.0, 2.0], [1.0, NAN], False),
        ([1.0, NAN], [1.0, 2.0], False),
        ([1.0, 2.0, 3.0], [1.0, 2.0], False),
        ([], [], True),
        ([0.0, 0.0], [0.0, 0.0], True),
        ([1e-3, 0.0], [0.0, 0.0], False),
        ([1e6 + 1, 1e-3], [1e6, 0.0], True),  # rounding of the large one
    ],
)
def test_nan_and_infinity_compare_equal_in_the_same_places(
    actual: list[float], expected: list[float], passes: bool
) -> None:
    found = compare_tensors(torch.tensor(actual), torch.tensor(expected), 1e-5)
    assert found.passed is passes and (found.where == "") is passes


@given(st.integers(0, 3), st.integers(0, 4))
def test_the_worst_element_is_named(row: int, column: int) -> None:
    expected = torch.ones(4, 5)
    actual = expected.clone()
    actual[row, column] = 3.0
    actual[3 - row, column] += 0.1
    where = compare_tensors(actual, expected, 1e-6).where
    assert where.startswith(f"at [{row}, {column}]: 3") and where.endswith("2 of 20 elements differ")


def test_tolerances_fit_the_type() -> None:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tolerances = [rounding_tolerance(dtype) for dtype in order]
    assert tolerances == sorted(tolerances) and tolerances[-1] < 0.05
    assert rounding_tolerance(torch.int64) == 0.0
