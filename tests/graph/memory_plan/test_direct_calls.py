"""Torch's own functions for operators: taken where they are the same call, and only there."""

from typing import Any

import pytest
import torch

from weft.graph.memory_plan.direct_calls import direct_call

aten = torch.ops.aten
X, Y = torch.ones(3, 3), torch.ones(3, 3)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "expected"),
    [
        (aten.add.Tensor, (X, Y), {}, "torch.add"),
        (aten.add.Tensor, (X, Y), {"alpha": 2}, "torch.add"),
        (aten.add.out, (X, Y), {"out": X}, "torch.add"),
        (aten.mul.Tensor, (X, 0.5), {}, "torch.mul"),
        (aten.view.default, (X, [9]), {}, "torch.Tensor.view"),
        (aten.gelu.out, (X,), {"out": Y}, "torch.nn.functional.gelu"),
        (aten.sum.dim_IntList, (X, [0], True), {}, "torch.sum"),
        (aten.cat.default, ([X, Y], 1), {}, "torch.cat"),
        (aten.copy_.default, (X, Y), {}, "torch.Tensor.copy_"),
    ],
)
def test_direct_call_of_an_operator_is_found(target: Any, args: Any, kwargs: Any, expected: str) -> None:
    assert direct_call(target, args, kwargs) == expected


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (aten.threshold_backward.default, (X, Y, 0), {}),  # has no function
        (aten.add.Scalar, (X, 1), {}),  # torch.add(x, 1) is another overload
        (aten.mul.Scalar, (X, 2), {}),
        (aten._to_copy.default, (X,), {"dtype": torch.float64}),
        (aten.split.Tensor, (X, 1), {}),  # torch.split is written in Python, and does more
        (aten.slice.Tensor, (X, 0, 0, 1), {}),
        (aten.linear.default, (X, Y), {}),  # comes out as what it is made of
    ],
)
def test_function_that_calls_another_operator_is_not_taken(target: Any, args: Any, kwargs: Any) -> None:
    assert direct_call(target, args, kwargs) is None


def test_finding_a_direct_call_computes_nothing() -> None:
    memory = torch.zeros(2)
    direct_call(aten.add.out, (torch.ones(2), torch.ones(2)), {"out": memory})
    assert memory.tolist() == [0.0, 0.0]
