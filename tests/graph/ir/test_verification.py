"""The specification of a valid graph: each rule is shown to catch a fault planted for it."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from tests.graph.steps import descent, descent_inputs, graph_of
from weft.errors import GraphError
from weft.graph import Graph, capture, check_graph, check_pass, check_shapes
from weft.graph.ir.symbolic_sizes import Condition, Size
from weft.graph.ir.verification import RULES

aten = torch.ops.aten


def fresh() -> Graph:
    return capture(descent, *descent_inputs()).edited()


def call_of(graph: Graph, target: object) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes.nodes if node.target is target)
    return found


def moved_before_its_input(graph: Graph) -> Graph:
    graph.placeholders[-1].append(call_of(graph, aten.mean.default))
    return graph


def unknown_kind(graph: Graph) -> Graph:
    node = graph.nodes.create_node("call_module", "layer")
    graph.placeholders[-1].append(node)
    return graph


def argument_behind_a_call(graph: Graph) -> Graph:
    call_of(graph, aten.mm.default).append(graph.placeholders[-1])
    return graph


def argument_too_many(graph: Graph) -> Graph:
    with graph.nodes.inserting_after(graph.placeholders[-1]):
        graph.nodes.placeholder("more").meta["val"] = graph.placeholders[0].meta["val"]
    return graph


def retarget(target: Callable[..., object]) -> Callable[[Graph], Graph]:
    def plant(graph: Graph) -> Graph:
        call_of(graph, aten.mean.default).target = target
        return graph

    return plant


def missing_argument(graph: Graph) -> Graph:
    call_of(graph, aten.mm.default).args = call_of(graph, aten.mm.default).args[:1]
    return graph


def unknown_keyword(graph: Graph) -> Graph:
    call_of(graph, aten.mean.default).kwargs = {"colour": 1}
    return graph


def baked_tensor(graph: Graph) -> Graph:
    node = call_of(graph, aten.sub.Tensor)
    node.args = (node.args[0], torch.ones(2))
    return graph


def shape_forgotten(graph: Graph) -> Graph:
    del call_of(graph, aten.mean.default).meta["val"]
    return graph


def constant_without_value(graph: Graph) -> Graph:
    with graph.nodes.inserting_after(graph.placeholders[-1]):
        graph.nodes.get_attr("nothing").meta["val"] = torch.ones(2)
    return graph


def output_out_of_range(graph: Graph) -> Graph:
    mean = call_of(graph, aten.mean.default)
    with graph.nodes.inserting_after(mean):
        graph.nodes.call_function(operator.getitem, (mean, 0)).meta["val"] = torch.ones(2)
    return graph


def result_too_many(graph: Graph) -> Graph:
    output = graph.nodes.output_node()
    output.args = ((*graph.result_nodes, graph.placeholders[0]),)
    return graph


def result_is_a_number(graph: Graph) -> Graph:
    graph.nodes.output_node().args = ((3.0, *graph.result_nodes[1:]),)
    return graph


def state_changes_shape(graph: Graph) -> Graph:
    first, *rest = graph.result_nodes
    graph.nodes.output_node().args = ((first, *reversed(rest)),)
    return graph


def size_of_nobody(graph: Graph) -> Graph:
    sizes: Any = [Size("name", ("batch",))]
    call_of(graph, aten.mean.default).args = (call_of(graph, aten.mm.default), sizes)
    return graph


def condition_on_nobody(graph: Graph) -> Graph:
    return replace(graph, conditions=(Condition("gt", Size("name", ("batch",)), 3),))


def nothing_to_wait_for(graph: Graph) -> Graph:
    mean = call_of(graph, aten.mean.default)
    with graph.nodes.inserting_after(mean):
        graph.nodes.call_function(torch.ops.weft.wait.default, (mean,)).meta["val"] = mean.meta["val"]
    return graph


def never_waited_for(graph: Graph) -> Graph:
    mean = call_of(graph, aten.mean.default)
    with graph.nodes.inserting_after(mean):
        started = graph.nodes.call_function(torch.ops.weft.all_reduce.default, (mean, "sum", "world"))
    started.meta["val"] = mean.meta["val"]
    return graph


PLANTED: tuple[tuple[Callable[[Graph], Graph], str, str], ...] = (
    (unknown_kind, "is of kind call_module", "_known_kinds"),
    (moved_before_its_input, "before it is made", "_order"),
    (argument_behind_a_call, "argument stands behind an operator", "_arguments"),
    (argument_too_many, "arguments and their places differ", "_arguments"),
    (retarget(torch.mean), "which is no operator", "_calls"),
    (retarget(aten.relu_.default), "writes in place", "_calls"),
    (output_out_of_range, "has none of that number", "_calls"),
    (missing_argument, "does not fit its operator", "_signatures"),
    (unknown_keyword, "does not fit its operator", "_signatures"),
    (baked_tensor, "neither a variable nor a literal", "_signatures"),
    (shape_forgotten, "are not noted", "_values"),
    (constant_without_value, "has no value", "_values"),
    (result_too_many, "results and their places differ", "_results"),
    (result_is_a_number, "a result is no variable", "_results"),
    (state_changes_shape, "changes", "_new_state"),
    (size_of_nobody, "reads a size that no argument has", "_sizes"),
    (nothing_to_wait_for, "waits for what was not started", "_promises"),
    (never_waited_for, "is to be waited for once", "_promises"),
    (condition_on_nobody, "condition is on a size that no argument has", "_sizes"),
)


@pytest.mark.parametrize(("plant", "fault", "rule"), PLANTED, ids=[f"{r} {f}" for _, f, r in PLANTED])
def test_a_planted_fault_is_found(plant: Callable[[Graph], Graph], fault: str, rule: str) -> None:
    graph = plant(fresh())
    with pytest.raises(GraphError, match=fault):
        check_graph(graph)
    (found,) = (r for r in RULES if r.__name__ == rule)
    assert fault in next(found(graph))


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule for _, _, rule in PLANTED} == {rule.__name__ for rule in RULES}


def test_a_wrong_shape_is_found_by_asking_the_operators() -> None:
    graph = fresh()
    check_shapes(graph)
    node = call_of(graph, aten.mm.default)
    node.meta["val"] = node.meta["val"].t()
    with pytest.raises(GraphError, match="shape of mm"):
        check_shapes(graph)


def test_a_pass_that_drops_a_random_draw_is_caught() -> None:
    graph = graph_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.ones(1, 2), targets=torch.ones(1, 2))
    after = graph.edited()
    draw = call_of(after, aten.bernoulli.p)
    draw.replace_all_uses_with(draw.args[0])  # type: ignore[arg-type]
    after.nodes.erase_node(draw)
    with pytest.raises(GraphError, match="draws random numbers"):
        check_pass(graph, after)


def test_a_pass_that_changes_the_results_is_caught() -> None:
    graph = fresh()
    with pytest.raises(GraphError, match="arguments or the results"):
        check_pass(graph, replace(graph, results=("dict", (("outputs", ("leaf", 0)), *graph.results[1][1:]))))


def test_a_pass_that_changes_the_conditions_is_caught() -> None:
    graph = capture(lambda state, batch: (batch * 2, state), (), torch.ones(4), dynamic="batch")
    with pytest.raises(GraphError, match="conditions on the sizes"):
        check_pass(graph, replace(graph, conditions=(Condition("gt", Size("name", ("batch",)), 3),)))
