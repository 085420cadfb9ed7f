"""Exact rules: each does what the documentation says, and leaves every bit as it was, on random graphs and numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from tests.graph.rewrites.examples import (
    EXAMPLES,
    Example,
    awkward,
    bits_of,
    graph_of,
    shape_of_graph,
    value,
    values_of,
)
from weft.graph import EXACT, Graph, Rule, capture, check_shapes, rewrite
from weft.graph.rewrites.cleanup import DEAD

aten = torch.ops.aten

TABLE = {rule.name: rule for rule in EXACT}
ROWS = [example for example in EXAMPLES if example.rule in TABLE]
FLOATS = [torch.float32, torch.float64]


def test_every_exact_rule_has_an_example() -> None:
    assert {example.rule for example in ROWS} == TABLE.keys()
    assert all(rule.is_exact for rule in EXACT)


@pytest.mark.parametrize("example", ROWS, ids=lambda example: example.rule)
def test_a_rule_does_what_the_documentation_says(example: Example) -> None:
    before = graph_of(example.before)
    after = rewrite(before, [TABLE[example.rule], DEAD], check_each=True)
    assert shape_of_graph(after) == shape_of_graph(graph_of(example.after))
    assert (
        len(after.operators) < len(before.operators)
        or shape_of_graph(after) != shape_of_graph(before)
        or (
            example.rule == "dead code"  # a capture leaves none
        )
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("example", ROWS, ids=lambda example: example.rule)
def test_a_rule_keeps_the_bits_of_awkward_numbers(example: Example, dtype: torch.dtype) -> None:
    before = graph_of(example.before, dtype)
    after = rewrite(before, [TABLE[example.rule], DEAD])
    for seed in range(20):
        inputs = awkward(before, seed)
        assert bits_of(values_of(after, inputs)) == bits_of(values_of(before, inputs))


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.relu,
    torch.neg,
    lambda x: x.t(),
    lambda x: x.view(4, 4),
    lambda x: x.clone(),
    lambda x: x * 2.0,
    lambda x: x + 0.0,
    torch.ones_like,
    torch.zeros_like,
    lambda x: x.expand(4, 4),
    lambda x: torch.tensor([[1.5, -0.0, 2.0, 1.0]]).expand(4, 4) * 2,
    lambda x: nn.functional.dropout(x.t(), 0.5),
    lambda x: torch.split(x, [1, 3])[1].sum() * x,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.add, torch.mul, torch.sub, torch.matmul, torch.maximum)

Program = tuple[Sequence[tuple[int, int, int]], Sequence[int], int]
"""Calls (an operator, and which of the values before it it takes), results, and when the example comes."""

calls = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=8
)
programs = st.tuples(calls, st.lists(st.integers(0, 20), min_size=1, max_size=4), st.integers(0, 8))


def random_graph(program: Program, example: str = "x") -> Graph:
    steps, results, when = program

    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        values = [state, batch]
        for place, (number, i, j) in enumerate([*steps, (0, 0, 0)]):
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            if place == when % (len(steps) + 1):
                made = value(example, {"x": a, "y": b, "z": batch, "a": a[0], "b": b[1]})
                values.append(made if made.shape == (4, 4) else made.sum() * a)
            values.append(UNARY[number](a) if number < len(UNARY) else BINARY[number - len(UNARY)](a, b))
        return [values[i % len(values)] for i in results], values[-1].clone()

    return capture(step, torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize("example", ROWS, ids=lambda example: example.rule)
@settings(max_examples=5)
@given(program=programs)
def test_a_rule_keeps_the_bits_of_random_graphs(example: Example, program: Program) -> None:
    graph = random_graph(program, example.before)
    after = rewrite(graph, [TABLE[example.rule]], check_each=True)
    assert bits_of(values_of(after, awkward(graph))) == bits_of(values_of(graph, awkward(graph)))


@settings(max_examples=25)
@given(program=programs, example=st.sampled_from(ROWS))
def test_all_rules_together_keep_the_bits_of_random_graphs(program: Program, example: Example) -> None:
    graph = random_graph(program, example.before)
    after = rewrite(graph, check_each=True)
    check_shapes(after)
    assert len(after.operators) <= len(graph.operators)
    assert bits_of(values_of(after, awkward(graph))) == bits_of(values_of(graph, awkward(graph)))


def retarget(old: Any, new: Any) -> Rule:
    def edit(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
        for node in nodes.find_nodes(op="call_function", target=old):
            node.target = new
        return 0

    return Rule("wrong", edit)


def without_zero(target: Any) -> Rule:
    """x + 0.0 -> x: right for every number but -0.0."""

    def edit(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
        for node in nodes.find_nodes(op="call_function", target=target):
            if node.args[1] == 0.0:
                node.replace_all_uses_with(node.args[0])
        return 0

    return Rule("almost right", edit)


@pytest.mark.parametrize(
    "expression, rule",
    [("x + y", retarget(aten.add.Tensor, aten.sub.Tensor)), ("x + 0.0", without_zero(aten.add.Tensor))],
    ids=["another operator", "a neutral zero"],
)
def test_a_rule_that_is_not_exact_is_caught_by_the_bits(expression: str, rule: Rule) -> None:
    graph = graph_of(expression)
    after = rewrite(graph, [rule])
    assert any(
        bits_of(values_of(after, i)) != bits_of(values_of(graph, i)) for i in (awkward(graph, s) for s in range(3))
    )
