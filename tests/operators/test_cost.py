"""Costs from shapes: held against torch's counter where it has a formula, against numbers by hand elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from weft.operators import Cost, cost_of, count_cost, register_cost, tensor_bytes

aten = torch.ops.aten
sizes = st.integers(1, 9)


def torch_flops(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


@given(m=sizes, k=sizes, n=sizes, b=sizes)
def test_products_count_as_torch_counts_them(m: int, k: int, n: int, b: int) -> None:
    cases: list[tuple[Any, tuple[Tensor, ...]]] = [
        (aten.mm.default, (torch.ones(m, k), torch.ones(k, n))),
        (aten.addmm.default, (torch.ones(n), torch.ones(m, k), torch.ones(k, n))),
        (aten.bmm.default, (torch.ones(b, m, k), torch.ones(b, k, n))),
        (aten.baddbmm.default, (torch.ones(b, m, n), torch.ones(b, m, k), torch.ones(b, k, n))),
    ]
    for operator, inputs in cases:
        cost = cost_of(operator, inputs, {}, operator(*inputs))
        assert cost is not None and cost.flops == torch_flops(partial(operator, *inputs))


@pytest.mark.parametrize(
    ("transposed", "groups", "stride"), [(False, 1, 1), (False, 2, 2), (True, 1, 1), (True, 2, 2), (False, 4, 1)]
)
def test_convolutions_count_as_torch_counts_them(transposed: bool, groups: int, stride: int) -> None:
    x = torch.ones(2, 4, 7, 6)
    weight = torch.ones(4, 8 // groups, 3, 3) if transposed else torch.ones(8, 4 // groups, 3, 3)
    function = F.conv_transpose2d if transposed else F.conv2d
    call = lambda: function(x, weight, groups=groups, stride=stride)  # noqa: E731
    assert count_cost(call).total.flops == torch_flops(call)


def test_a_training_step_counts_as_torch_counts_it() -> None:
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    def step() -> None:
        layers(x).sum().backward()

    counted = count_cost(step)
    assert not counted.unknown
    others = counted.total.flops - torch_flops(step)
    assert 0 < others < 0.02 * counted.total.flops  # the sum, and the gradient of the bias


def test_attention_counts_as_torch_counts_it() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    cost = cost_of(operator, (q, k, v), {}, operator(q, k, v))
    assert cost is not None and cost.flops == 2 * 6 * 5 * 7 * 16


@pytest.mark.parametrize(
    ("call", "flops", "read", "written"),
    [
        (lambda x: x + x.t(), 12 * 12, 2 * 576, 576),
        (lambda x: torch.relu(x), 144, 576, 576),
        (lambda x: torch.sigmoid(x), 3 * 144, 576, 576),
        (lambda x: x.sum(0), 144, 576, 48),
        (lambda x: x.view(144), 0, 0, 0),
        (lambda x: x.clone(), 0, 576, 576),
        (lambda x: torch.softmax(x, -1), 5 * 144, 576, 576),
        (lambda x: x.add_(1.0), 144, 576, 576),
        (lambda x: x.sigmoid_(), 3 * 144, 576, 576),
        (lambda x: x + torch.empty(1, 12).expand(12, 12), 144, 576 + 48, 576),
        (lambda x: F.max_pool2d(x[None, None], 2), 36 * 4, 576, 36 * 4 + 36 * 8),
        (lambda x: F.avg_pool2d(x[None, None], (3, 2)), 24 * 6, 576, 24 * 4),
        (lambda x: F.embedding(torch.tensor([1, 1, 3]), x), 0, 24 + 144, 144),
        (lambda x: torch.empty(100, 100), 0, 0, 0),
    ],
)
def test_costs_agree_with_those_by_hand(call: Callable[[Tensor], object], flops: int, read: int, written: int) -> None:
    x = torch.rand(12, 12)
    counted = count_cost(lambda: call(x))
    assert counted.unknown == ()
    assert counted.total == Cost(flops, read, written)


def test_a_norm_reads_and_writes_its_rows() -> None:
    x, weight = torch.randn(4, 6), torch.ones(6)
    cost = count_cost(lambda: F.layer_norm(x, (6,), weight, weight)).total
    assert cost == Cost(8 * 24, 4 * (24 + 12), 4 * (24 + 4 + 4))


def test_cost_needs_shapes_only() -> None:
    a, b = torch.empty(2**20, 2**10, device="meta"), torch.empty(2**10, 2**20, device="meta")
    cost = cost_of(aten.mm.default, (a, b), {}, torch.empty(2**20, 2**20, device="meta"))
    assert cost == Cost(2**51, 2**33, 2**42)


def test_cost_of_an_unknown_operator_is_none() -> None:
    x = torch.eye(3)
    assert cost_of(aten.linalg_inv_ex.default, (x,), {}, (x, x)) is None
    assert count_cost(lambda: torch.linalg.inv_ex(x)).unknown == ("aten.linalg_inv_ex.default",)


def test_a_registered_cost_is_used() -> None:
    library = torch.library.custom_op("tests::costed", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
    packet = torch.ops.tests.costed
    assert cost_of(packet.default, (torch.ones(3),), {}, None) is None
    register_cost(packet, lambda x: Cost(7 * x.numel(), 0, 0))
    assert count_cost(lambda: library(torch.ones(3))).total.flops == 21


@given(st.lists(st.builds(Cost, *[st.integers(0, 10**12)] * 4), min_size=1, max_size=5))
def test_costs_add_up_and_workspace_is_given_back(costs: list[Cost]) -> None:
    total = sum(costs, Cost(0, 0, 0))
    assert total.flops == sum(cost.flops for cost in costs)
    assert total.bytes_moved == sum(cost.bytes_moved for cost in costs)
    assert total.workspace == max(cost.workspace for cost in costs)


def test_bytes_and_intensity() -> None:
    assert tensor_bytes(torch.empty(0, 3), torch.empty(3, dtype=torch.float16).expand(5, 3)) == 6
    assert Cost(6, 2, 1).intensity == 2.0
    assert Cost(6, 0, 0).intensity == float("inf")
