"""Exact rewrites: each rule, on random graphs, leaves every bit as it was; and each finds what it is for."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.errors import GraphError
from weft.graph import EXACT, Graph, Program, Rule, capture, check_shapes, rewrite

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin,
    torch.relu,
    lambda x: x.t(),
    lambda x: x.view(3, 3),
    lambda x: x.clone(),
    lambda x: x * 2.0,
    lambda x: x + 0.0,
    torch.ones_like,
    torch.zeros_like,
    lambda x: x.expand(3, 3),
    lambda x: torch.tensor([[1.5, -0.0, 2.0]]).expand(3, 3) * 2,
    lambda x: nn.functional.dropout(x.t(), 0.5),
    lambda x: torch.split(x, [1, 2])[1].sum() * x,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.add, torch.mul, torch.sub, torch.matmul, torch.maximum)

Call = tuple[int, int, int]
"""An operator, and which of the values before it it takes."""

calls = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=12
)


def step_of(program: Sequence[Call], results: Sequence[int]) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        values = [state, batch]
        for number, i, j in program:
            a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
            values.append(UNARY[number](a) if number < len(UNARY) else BINARY[number - len(UNARY)](a, b))
        return [values[i % len(values)] for i in results], values[-1].clone()

    return step


def bits_of(graph: Graph) -> list[bytes]:
    generator = torch.Generator().manual_seed(0)
    state, batch = torch.randn(3, 3, generator=generator), torch.randn(3, 3, generator=generator)
    outputs, new, random = Program(graph)(state, batch, generator.get_state())
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (*outputs, new, random)]


RULES = {**{rule.name: (rule,) for rule in EXACT}, "all": EXACT}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=40)
@given(program=calls, results=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_a_rule_leaves_every_bit_as_it_was(name: str, program: list[Call], results: list[int]) -> None:
    graph = capture(step_of(program, results), torch.ones(3, 3), torch.ones(3, 3))
    after = rewrite(graph, RULES[name])
    check_shapes(after)
    assert len(after.operators) <= len(graph.operators)
    assert bits_of(after) == bits_of(graph)


def targets_after(step: Callable[[Any, Any], tuple[Any, Any]]) -> list[str]:
    return [operator.target for operator in rewrite(capture(step, torch.ones(3, 3), torch.ones(3, 3))).operators]


def test_the_same_call_is_made_once() -> None:
    found = targets_after(lambda state, batch: (state.sin() + state.sin(), state))
    assert found == ["aten.sin", "aten.add.Tensor"]


def test_calls_with_unlike_numbers_are_not_the_same() -> None:
    found = targets_after(lambda state, batch: (state * 0.0 + state * -0.0 + state * True, state))
    assert found.count("aten.mul.Tensor") == 3


def test_a_view_that_undoes_a_view_is_gone() -> None:
    assert targets_after(lambda state, batch: (state.t().t().sin().view(3, 3), state)) == ["aten.sin"]


def test_what_depends_on_no_input_is_computed_once() -> None:
    found = targets_after(lambda state, batch: (state + (torch.ones_like(batch) * 3).sin(), state))
    assert found == ["aten.add.Tensor"]


def test_random_draws_are_neither_merged_nor_dropped() -> None:
    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        return torch.rand(3) + torch.rand(3), state

    assert targets_after(step).count("aten.rand") == 3


def test_results_stay_apart() -> None:
    graph = rewrite(
        capture(lambda state, batch: ([batch.sin(), batch.sin(), torch.zeros(3)], state), (), torch.ones(3))
    )
    program = Program(graph)
    first, second, zeros = program((), torch.ones(3))[0]
    first.fill_(9)
    zeros.fill_(9)
    assert second[0] != 9 and program((), torch.ones(3))[0][2].tolist() == [0.0] * 3


def test_a_recomputed_forward_is_not_merged_away() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        w = state.detach().requires_grad_()
        with torch.enable_grad():
            loss = checkpoint(lambda x: (x @ w).sin().sin(), batch, use_reentrant=False).sum()
            return [loss.detach(), torch.autograd.grad(loss, w)[0]], state  # type: ignore[return-value]

    assert targets_after(step).count("aten.sin") == 3  # two in forward, the first again in backward


def test_a_rule_that_changes_the_graph_wrongly_is_caught() -> None:
    def forget(nodes: torch.fx.Graph, constants: dict[str, Tensor]) -> int:
        output = nodes.output_node()
        output.args = ((next(iter(nodes.nodes)),) * len(output.args[0]),)  # type: ignore[arg-type]
        return 0

    graph = capture(lambda state, batch: (batch.sum(), state), torch.ones(3), torch.ones(3))
    with pytest.raises(GraphError, match="shape or type of a result"):
        rewrite(graph, [Rule("forget", forget)])


def test_a_rule_that_is_not_exact_is_caught_by_the_bits() -> None:
    def reassociate(nodes: torch.fx.Graph, constants: dict[str, Tensor]) -> int:
        for node in nodes.nodes:
            if node.target is torch.ops.aten.add.Tensor:
                node.target = torch.ops.aten.sub.Tensor
        return 0

    graph = capture(step_of([(len(UNARY), 0, 1)], [2]), torch.ones(3, 3), torch.ones(3, 3))
    assert bits_of(rewrite(graph, [Rule("wrong", reassociate)])) != bits_of(graph)
