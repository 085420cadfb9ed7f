"""Graphs on XLA: recurrent layers, drawn numbers, memory, refusals, steps in place."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.steps import descent, descent_inputs
from weft.errors import GraphError
from weft.graph import EagerExecutor, Graph, GraphExecutor, Loss, Program, capture
from weft.graph.jax import JaxProgram
from weft.specs import Batch


def jax_executor(module: nn.Module, loss: Loss) -> GraphExecutor:
    return GraphExecutor(module, loss, make_program=lambda graph, sunk: JaxProgram(graph, sunk=sunk))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, cell) = self.lstm(x)
        return outputs.sum(1) + hidden.sum() + cell.sum()  # type: ignore[no-any-return]


def test_recurrent_layers_have_the_gradients_of_eager() -> None:
    module = Recurrent()
    batch = Batch((torch.randn(2, 5, 3),), (torch.randn(2, 8),))
    found: list[dict[str, Tensor]] = []
    for executor in (EagerExecutor(module, nn.functional.mse_loss), jax_executor(module, nn.functional.mse_loss)):
        gradients: dict[str, Any] = {}
        executor(executor.initial_state(), batch, gradients.__setitem__)
        found.append(gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "draw", [lambda x: nn.functional.dropout(x, 0.3), lambda x: torch.native_dropout(x, 0.3, True)[0]]
)
def test_random_numbers_are_torchs_own(draw: Any) -> None:
    graph = capture(lambda state, batch: (draw(batch) + torch.rand_like(batch), state), (), torch.ones(4, 5))
    random = torch.Generator().manual_seed(3).get_state()
    found, _, after = JaxProgram(graph)((), torch.ones(4, 5), random)
    expected, _, expected_after = Program(graph)((), torch.ones(4, 5), random)
    torch.testing.assert_close(found, expected)
    assert after is not None and expected_after is not None and torch.equal(after, expected_after)


def test_what_depends_on_values_cannot_be_drawn() -> None:
    graph = capture(lambda state, batch: (torch.bernoulli(batch), state), (), torch.ones(2))
    with pytest.raises(
        GraphError, match=r"no such random operator \(operator: aten.bernoulli.default, line: test_jax_program"
    ):
        JaxProgram(graph)


def test_an_operator_that_is_in_no_table_is_named_with_its_line() -> None:
    graph = capture(lambda state, batch: (torch.linalg.inv(batch), state), (), torch.eye(2))
    with pytest.raises(
        GraphError, match=r"aten.linalg_inv_ex.default, line: test_jax_program.py:\d+\); use executor=graph"
    ):
        JaxProgram(graph)


def test_inputs_of_any_layout_and_type_come_through() -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return {
            "sum": batch["x"] + batch["n"],
            "flag": batch["n"] > 1,
            "half": batch["h"] * 2,
            "same": batch["x"],
        }, state

    batch = {"x": torch.randn(6, 8)[:, ::2].t(), "n": torch.arange(6), "h": torch.ones(3, dtype=torch.bfloat16)}
    found, expected = JaxProgram(capture(step, (), batch))((), batch)[0], step((), batch)[0]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor)


def test_results_may_be_written_to_and_inputs_stay() -> None:
    graph = capture(lambda state, batch: ({"a": batch * 2, "b": batch + 0}, state), (), torch.ones(1000))
    program, x = JaxProgram(graph), torch.ones(1000)
    first = program((), x)[0]
    first["a"].fill_(7)
    assert torch.equal(x, torch.ones(1000)) and torch.equal(first["b"], torch.ones(1000))
    assert torch.equal(program((), x)[0]["a"], torch.full((1000,), 2.0))


@pytest.fixture
def whole() -> tuple[Graph, Any, Any]:
    state, batch = descent_inputs()
    return capture(descent, state, batch), state, batch


def test_steps_in_place_give_what_single_steps_give(whole: tuple[Graph, Any, Any]) -> None:
    graph, state, batch = whole
    before = {name: tensor.clone() for name, tensor in tensors_of(state)}
    outputs, final = JaxProgram(graph).steps(state, [batch] * 3)
    program = Program(graph)
    expected = state
    for found in outputs:
        values, expected, _ = program(expected, batch)
        for (name, one), (_, other) in zip(tensors_of(found), tensors_of(values), strict=True):
            torch.testing.assert_close(one, other, msg=name)
    for (name, one), (_, other) in zip(tensors_of(final), tensors_of(expected), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(state))  # what was given stays


def test_loop_over_no_batches_leaves_the_state(whole: tuple[Graph, Any, Any]) -> None:
    graph, state, _ = whole
    assert JaxProgram(graph).steps(state, []) == ([], state)


def test_steps_refuse_what_is_random() -> None:
    graph = capture(lambda state, batch: (torch.rand_like(batch), state), (), torch.ones(2))
    with pytest.raises(GraphError, match="cannot draw random numbers"):
        JaxProgram(graph).steps((), [torch.ones(2)])


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_of(item, f"{path}.{key}")
