"""Rules that round differently: each does what the documentation says, and stays within the bound stated there."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.graph.rewrites.examples import (
    EXAMPLES,
    Example,
    graph_of,
    names_in,
    plain_numbers,
    shape_of_graph,
    value,
    values_of,
)
from tests.graph.rewrites.magnitudes import bound_of, num_operations
from weft.graph import Graph, Rule, capture, check_shapes, rewrite
from weft.graph.rewrites import REASSOCIATING, pattern_rule
from weft.graph.rewrites.cleanup import DEAD
from weft.graph.rewrites.pattern import Var

TABLE = {rule.name: rule for rule in REASSOCIATING}
ROWS = [example for example in EXAMPLES if example.rule in TABLE]
SMALL = [example for example in ROWS if not {"big", "u"} & set(names_in(example.before))]

x, y = Var("x"), Var("y")


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def excess(before: Graph, after: Graph, seed: int = 0) -> float:
    """By how much the difference is above its bound, at the worst element; below 0 where it holds."""
    inputs = plain_numbers(before, seed)
    bounds = bound_of(before, inputs, num_operations(before, after))
    pairs = zip(values_of(before, inputs)[:-1], values_of(after, inputs)[:-1], bounds, strict=True)
    return max(float(((a - b).abs() - bound).max()) for a, b, bound in pairs)


def test_every_rule_has_an_example() -> None:
    assert {example.rule for example in ROWS} == TABLE.keys()
    assert not any(rule.is_exact for rule in REASSOCIATING)


@pytest.mark.parametrize("example", ROWS, ids=lambda example: f"{example.rule}: {example.before[:20]}")
def test_a_rule_does_what_the_documentation_says(example: Example) -> None:
    before = graph_of(example.before)
    after = rewrite(before, [TABLE[example.rule], DEAD], check_each=True)
    assert shape_of_graph(after) == shape_of_graph(graph_of(example.after)) != shape_of_graph(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("example", ROWS, ids=lambda example: f"{example.rule}: {example.before[:20]}")
def test_a_rule_stays_within_its_bound(example: Example, dtype: torch.dtype) -> None:
    before = graph_of(example.before, dtype, result=as_it_is)
    after = rewrite(before, [TABLE[example.rule], DEAD])
    for seed in range(8 if example in SMALL else 1):
        assert excess(before, after, seed) <= 0


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.neg,
    lambda x: x.t(),
    lambda x: x * 3,
    lambda x: x / 7,
    lambda x: x + 1.5,
    lambda x: 2 - x,
    lambda x: x * -0.5,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.matmul,
    lambda x, y: x + y[0],
    lambda x, y: x * y[0],
    lambda x, y: torch.add(x, y, alpha=-3),
    lambda x, y: torch.add(x @ y, x, alpha=2),
    lambda x, y: torch.add(x * y, y, alpha=2),
)
Calls = Sequence[tuple[int, int, int]]
calls = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 3), st.integers(0, 3)), max_size=9
)


def random_graph(steps: Calls, example: str, dtype: torch.dtype) -> Graph:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        values = [value(example, {"x": state, "y": batch, "z": state.t(), "a": state[0], "b": batch[1]}), state, batch]
        for number, i, j in steps:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(UNARY[number](a) if number < len(UNARY) else BINARY[number - len(UNARY)](a, b))
        return [values[-1] + values[0], values[-2] * values[0]], state

    return capture(step, torch.ones(4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@settings(max_examples=40)
@given(steps=calls, example=st.sampled_from(SMALL))
def test_all_rules_together_stay_within_the_bound(dtype: torch.dtype, steps: Calls, example: Example) -> None:
    before = random_graph(steps, example.before, dtype)
    after = rewrite(before, reassociate=True, check_each=True)
    check_shapes(after)
    assert excess(before, after) <= 0


@pytest.mark.parametrize(
    "rule",
    [
        pattern_rule("scaled", x * y, x * (y * 1.0001), is_exact=False),
        pattern_rule("turned round", x - y, y - x, is_exact=False),
        pattern_rule("lost", x + y, x * 1.0, is_exact=False),
    ],
    ids=lambda rule: rule.name,
)
def test_a_wrong_rule_is_caught_by_the_bound(rule: Rule) -> None:
    before = graph_of("x * y - a + b", result=as_it_is)
    once = iter([rule.edit])

    def edit(nodes: torch.fx.Graph, constants: dict[str, Tensor]) -> int:
        return next(once, lambda *_: 0)(nodes, constants)

    assert excess(before, before) <= 0 < excess(before, rewrite(before, [Rule(rule.name, edit)]))


def targets_after(step: Callable[[Any, Any], tuple[Any, Any]], *shapes: Sequence[int]) -> list[str]:
    batch = [torch.ones(shape) for shape in shapes]
    return [operator.target for operator in rewrite(capture(step, (), batch), reassociate=True).operators]


def test_a_sum_stops_where_others_read_along() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        inner = batch[0] + 1
        return [inner + 2, inner.sin()], state

    assert targets_after(step, (4, 4)).count("aten.add.Tensor") == 2


def test_a_sum_of_whole_numbers_is_left_alone() -> None:
    assert targets_after(lambda s, b: (b[0].long() + 1 - 2, s), (4, 4))[1:] == ["aten.add.Tensor", "aten.sub.Tensor"]


def test_a_variable_is_not_cancelled_from_a_product() -> None:
    assert targets_after(lambda s, b: (b[0] / b[1] * b[1], s), (4, 4), (4, 4)).count("aten.div.Tensor") == 1


def test_momentum_becomes_two_calls() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        weight, velocity, gradient = batch
        velocity = velocity * 0.9 + gradient
        return [weight - 0.1 * velocity, velocity], state

    assert targets_after(step, (4, 4), (4, 4), (4, 4)) == ["aten.add.Tensor", "aten.add.Tensor"]


def test_a_convolution_that_others_read_keeps_its_batch_norm() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        image, weight, scale = batch
        made = torch.conv2d(image, weight)
        normal = torch.batch_norm(made, scale, scale, scale, scale, False, 0.1, 1e-5, False)
        return [normal, made], state

    assert "aten.native_batch_norm" in targets_after(step, (8, 3, 32, 32), (5, 3, 3, 3), (5,))


def test_batch_norm_in_training_stays() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        image, weight, scale = batch
        return torch.batch_norm(torch.conv2d(image, weight), scale, scale, None, None, True, 0.1, 1e-5, False), state

    assert "aten.native_batch_norm" in targets_after(step, (8, 3, 32, 32), (5, 3, 3, 3), (5,))
