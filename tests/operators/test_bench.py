"""Timings of operators, and where they are placed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.operators.rooflines import ROUND
from weft.operators import Cost, operator
from weft.operators.bench import bench_operator, place


@pytest.mark.parametrize(
    ("cost", "memory", "bound", "share"),
    [
        (Cost(10**9, 10**9, 0), "DRAM", "memory", 0.1),
        (Cost(10**9, 100, 100), "L1", "compute", 1 / 60),
        (Cost(10**9, 100, 100, workspace=5000), "L2", "compute", 1 / 60),
        (Cost(0, 10**9, 10**9), "DRAM", "memory", 0.2),
    ],
)
def test_placement_under_the_roofline(cost: Cost, memory: str, bound: str, share: float) -> None:
    found = place(cost, 1.0, ROUND)
    assert (found.memory, found.bound) == (memory, bound)
    assert found.share == pytest.approx(share)
    assert found.byte_rate == cost.bytes_moved and found.flop_rate == cost.flops


class Double:
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        return 2 * grads[0]

    def samples(self) -> list[Any]:
        return [torch.ones(10)]

    def bench_samples(self) -> list[Any]:
        return [torch.ones(20), torch.ones(30, dtype=torch.float64)]


def test_both_directions_of_every_sample_with_the_cost_of_what_ran() -> None:
    results = bench_operator(operator(Double, name="tests::bench_double"), ROUND, max_seconds=0.01)
    assert [(r.sample, r.direction, r.dtype) for r in results] == [
        *((0, "forward", "float32"), (0, "backward", "float32")),
        *((1, "forward", "float64"), (1, "backward", "float64")),
    ]
    assert [r.cost for r in results[::2]] == [Cost(20, 80, 80), Cost(30, 240, 240)]
    assert all(r.cost is not None and r.cost.flops == r.shapes[0][0] for r in results)
    assert all(r.seconds.median > 0 and r.placement is not None for r in results)


def test_a_stated_cost_comes_first_and_an_unknown_one_is_not_guessed() -> None:
    class Stated(Double):
        def cost(self, x: Tensor) -> Cost:
            return Cost(7, 1, 1)

    class Hidden:
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(x.numpy() + 1)

        def samples(self) -> list[Any]:
            return [torch.ones(10)]

    stated = bench_operator(operator(Stated, name="tests::bench_stated"), ROUND, max_seconds=0.01)
    assert stated[0].cost == Cost(7, 1, 1)
    (hidden,) = bench_operator(operator(Hidden, name="tests::bench_hidden"), ROUND, max_seconds=0.01)
    assert hidden.cost is None and hidden.placement is None
