"""Rewrites of graphs whose sizes have names: the same rules, and graphs that still run for any size."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.rewrites.examples import values_of
from weft.graph import Graph, Step, capture, check_shapes, rewrite
from weft.graph.fusion import fuse, regions_of


def normalise(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
    rows = batch.view(batch.shape[0] * 2, -1).view(batch.shape[0], 8)
    return [rows + state + rows * 1 + state + 1 - 2, (rows @ state.expand(8, 8) + state).t().t() / 4], state


def train(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
    weight = state.detach().requires_grad_()
    with torch.enable_grad():
        loss = nn.functional.gelu(batch * weight + weight).sum() / batch.shape[0]
        (gradient,) = torch.autograd.grad(loss, weight)
    return loss.detach(), state - 0.1 * gradient


def dynamic(step: Step) -> Graph:
    return capture(step, torch.ones(8), torch.ones(5, 8), dynamic={"batch": {0: "length"}})


@pytest.mark.parametrize("step", [normalise, train])
def test_a_rewritten_graph_runs_for_any_size(step: Step) -> None:
    graph = dynamic(step)
    after = fuse(rewrite(graph, reassociate=True, check_each=True))
    check_shapes(after)
    assert len(after.operators) < len(graph.operators)
    for length in (3, 5, 17):
        inputs = [torch.rand(8), torch.rand(length, 8)]
        for found, expected in zip(values_of(after, inputs), values_of(graph, inputs), strict=True):
            torch.testing.assert_close(found, expected)


def test_small_operands_still_come_first() -> None:
    found = rewrite(dynamic(lambda state, batch: (batch + state + batch * 2 + state.sin(), state)), reassociate=True)
    assert [made.target for made in found.operators][-3:] == ["aten.sin", "aten.add.Tensor", "aten.add.Tensor"]


def test_regions_hold_known_shapes_only() -> None:
    assert not regions_of(fuse(dynamic(lambda s, b: (b.sin().cos(), s)), worth=lambda group: True))
    assert regions_of(fuse(dynamic(lambda s, b: (b.sum(), s.sin().cos())), worth=lambda group: True))
