"""Regions: the same bits before they are compiled, in an order that can run, without what must stay outside."""

import operator
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx, nn

from tests.graph.rewrites.examples import awkward, bits_of, values_of
from tests.graph.rewrites.test_exact import Program as Calls
from tests.graph.rewrites.test_exact import programs, random_graph
from tests.graph.steps import graph_of
from weft.graph import Graph, capture, check_shapes, grad, load_graph, save_graph
from weft.graph.fusion import fuse, region_of, regions_of, unfuse
from weft.graph.fusion.contraction import contract
from weft.graph.fusion.members import is_view_in_region
from weft.operators import cost_of


def always(_group: object) -> bool:
    return True


def targets_of(graph: Graph) -> list[str]:
    return [made.target for made in graph.operators]


@settings(max_examples=30)
@given(program=programs)
def test_a_fused_graph_computes_the_same_bits(program: Calls) -> None:
    graph = random_graph(program, "(x * y + a).t() * 2")
    fused = fuse(graph, worth=always)
    check_shapes(fused)
    expected = bits_of(values_of(graph, awkward(graph)))
    assert bits_of(values_of(fused, awkward(graph))) == expected
    opened = unfuse(fused)
    assert bits_of(values_of(opened, awkward(graph))) == expected
    assert Counter(targets_of(graph)) <= Counter(targets_of(opened))  # a view may be taken twice


@settings(max_examples=30)
@given(program=programs)
def test_a_region_gives_away_no_views_and_holds_no_draws(program: Calls) -> None:
    for region in regions_of(fuse(random_graph(program), worth=always)).values():
        inside = {node for node in region.nodes.nodes if node.op == "call_function"}
        assert not any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in inside)
        assert not any(map(is_view_in_region, region.output_nodes))


def layers(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
    for weight in state:
        batch = ((batch @ weight) * 2 + 1).tanh()
    return batch, state


def test_equal_regions_are_one_operator() -> None:
    fused = fuse(capture(layers, torch.ones(3, 4, 4), torch.ones(4, 4)), worth=always)
    (region,) = regions_of(fused).values()
    assert targets_of(fused).count(f"weft_region.{region.name}") == 3
    assert region.text.splitlines() == [
        "in0: float32[4, 4]",
        "v0: float32[4, 4] = aten.mul.Tensor(in0, 2)",
        "v1: float32[4, 4] = aten.add.Tensor(v0, 1)",
        "v2: float32[4, 4] = aten.tanh.default(v1)",
        "return [v2]",
    ]


def test_unlike_strides_make_unlike_regions() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        return [(batch @ batch).exp().sin(), (batch @ batch).t().exp().sin().sum(0)], state

    assert len(regions_of(fuse(capture(step, (), torch.ones(4, 4)), worth=always))) == 2


def momentum(state: Any, batch: Any) -> tuple[Any, Any]:
    gradients = {name: (batch.t() @ batch) * weight for name, weight in state["w"].items()}
    velocity = {name: state["v"][name] * 0.9 + gradients[name] for name in gradients}
    weights = {name: state["w"][name] - 0.1 * velocity[name] for name in gradients}
    return batch.sum(), {"w": weights, "v": velocity}


def momentum_inputs(num_weights: int, size: int = 8) -> tuple[Any, Tensor]:
    w = {f"w{i}": torch.randn(size, size) for i in range(num_weights)}
    return {"w": w, "v": {name: torch.zeros(size, size) for name in w}}, torch.randn(size, size)


def test_the_update_of_all_parameters_is_one_region() -> None:
    fused = fuse(capture(momentum, *momentum_inputs(5)))
    (region,) = regions_of(fused).values()
    assert len(region.outputs) == 10 and region.name.startswith("mul_add_sub_")


def test_a_huge_update_is_cut_into_regions() -> None:
    fused = fuse(capture(momentum, *momentum_inputs(150)))
    sizes = [sum(node.op == "call_function" for node in region.nodes.nodes) for region in regions_of(fused).values()]
    assert len(sizes) == 2 and max(sizes) <= 400 and sum(sizes) == 150 * 5


def clipped(state: Any, batch: Any) -> tuple[Any, Any]:
    gradients = {name: (batch.t() @ batch) * weight for name, weight in state["w"].items()}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    scale = 1 / (norm + 1e-6).clamp(min=1)
    return batch.sum(), {**state, "w": {name: w - gradients[name] * scale for name, w in state["w"].items()}}


def test_an_update_that_all_gradients_decide_is_cut_where_it_can_be() -> None:
    # The scale is a scalar that every update reads, but unlike a learning rate it comes of all the gradients.
    graph = capture(clipped, *momentum_inputs(150))
    fused = fuse(graph, worth=always)
    assert len(regions_of(fused)) > 1
    state, batch = momentum_inputs(150)
    inputs = [*state["w"].values(), *state["v"].values(), batch]
    assert bits_of(values_of(fused, inputs)) == bits_of(values_of(graph, inputs))


def test_few_calls_on_small_tensors_are_left_alone() -> None:
    graph = capture(layers, torch.ones(1, 4, 4), torch.ones(4, 4))
    assert targets_of(fuse(graph)) == targets_of(graph)


def test_regions_belong_to_one_part_of_the_step() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(4, 4), targets=torch.ones(4, 4))
    roles = {made.role for made in graph.operators}
    assert roles == {made.role for made in fuse(graph, worth=always).operators}


def test_nothing_moves_across_a_random_draw() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        first = torch.rand_like(batch.sin().cos())
        second = torch.rand_like(batch)
        return [first, (second.exp() + batch.sin().cos()).log()], state

    graph = capture(step, (), torch.ones(4))
    fused = fuse(graph, worth=always)
    assert bits_of(values_of(fused, awkward(graph))) == bits_of(values_of(graph, awkward(graph)))
    assert len(regions_of(fused)) == 2


def test_a_group_that_would_form_a_ring_is_refused() -> None:
    graph = capture(lambda state, batch: ((batch.sin() @ batch).cos(), state), (), torch.ones(4, 4))
    ring = [node for node in graph.nodes.nodes if str(node.target) in ("aten.sin.default", "aten.cos.default")]
    with pytest.raises(AssertionError, match="groups form a ring"):
        contract(graph.nodes, [ring])


def test_a_fused_graph_is_saved_as_its_operators(tmp_path: Path) -> None:
    graph = capture(momentum, *momentum_inputs(2))
    save_graph(fuse(graph, worth=always), tmp_path / "step")
    assert Counter(targets_of(load_graph(tmp_path / "step"))) == Counter(targets_of(graph))


def test_gradients_are_taken_through_a_region() -> None:
    plain = capture(lambda state, batch: ({"loss": (state * batch).sin().sum()}, state), torch.ones(3), torch.ones(3))
    found = [grad(graph, "outputs.loss", ["state"]) for graph in (plain, fuse(plain, worth=always))]
    inputs = [torch.rand(3), torch.rand(3)]
    assert bits_of(values_of(found[0], inputs)) == bits_of(values_of(found[1], inputs))


def test_a_region_knows_its_cost() -> None:
    fused = fuse(capture(layers, torch.ones(1, 4, 4), torch.ones(4, 4)), worth=always)
    node: fx.Node = next(n for n in fused.nodes.nodes if region_of(n.target))
    cost = cost_of(node.target, ([torch.ones(4, 4)],), {}, None)
    assert cost is not None and (cost.flops, cost.bytes_read, cost.bytes_written) == (48, 64, 64)


def test_several_outputs_of_one_call_stay_with_it() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        return nn.functional.layer_norm(batch * 2, (4,), state, state).relu() @ batch, state

    fused = fuse(capture(step, torch.ones(4), torch.ones(4, 4)), worth=always)
    assert len(regions_of(fused)) == 1
    inside = next(iter(regions_of(fused).values())).nodes.nodes
    assert any(node.target is operator.getitem for node in inside)


def test_what_compiles_to_slower_code_stays_outside() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        halves = batch[:128] * 2
        sums = [(batch * 2).sum(0), (batch * 3).sum(1), halves.sum(0)]
        return [*sums, nn.functional.gelu(halves * 3), nn.functional.gelu(halves * 4, approximate="tanh")], state

    fused = fuse(capture(step, (), torch.ones(512, 256)), worth=always)
    outside = [target for target in targets_of(fused) if not target.startswith(("weft_region", "aten.slice"))]
    assert outside == ["aten.sum.dim_IntList", "aten.gelu"]
