"""Recording: writes in place become new values, through aliases and views alike, with the bits of eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import GraphError
from weft.graph import Program, capture
from weft.graph.capture.recorder import Recorder
from weft.graph.capture.tracing import note_call
from weft.torch_private import fake_mode

Change = Callable[[Tensor, Tensor], Any]


def through_an_alias(x: Tensor, y: Tensor) -> Tensor:
    x.detach().add_(y)
    return x * 2


def twice(x: Tensor, y: Tensor) -> Tensor:
    before = x + 1
    x.mul_(y)
    return before + x.add_(1)


def before_a_view(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y)
    return x.view(-1).sum()


def with_another_type(x: Tensor, y: Tensor) -> Tensor:
    return x.mul_(y.to(torch.float64))


def through_a_view(x: Tensor, y: Tensor) -> Tensor:
    x[0] = y[1]
    return x.sum()


def before_and_through_a_view(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    row = x[1]
    row.mul_(3)
    x.sub_(y)
    return row.clone()


def of_several(x: Tensor, y: Tensor) -> Tensor:
    torch._foreach_add_([x], [y])
    return x + y


def into_a_given_tensor(x: Tensor, y: Tensor) -> Tensor:
    torch.add(x, y, out=x)
    return x - y


def into_fresh_memory(x: Tensor, y: Tensor) -> Tensor:
    whole = torch.zeros(4, 3)
    whole[:2] = x
    whole[2:].copy_(y)
    return whole.t().contiguous()


def by_index(x: Tensor, y: Tensor) -> Tensor:
    x[torch.tensor([1, 0])] = y
    return x.t()


RESOLVED = (through_an_alias, twice, before_a_view)
LEFT = (
    with_another_type,
    through_a_view,
    before_and_through_a_view,
    of_several,
    into_a_given_tensor,
    into_fresh_memory,
)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.arange(6.0).reshape(2, 3), torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])


@pytest.mark.parametrize("change", [*RESOLVED, *LEFT, by_index], ids=lambda change: change.__name__)
def test_a_captured_write_has_the_effect_of_an_eager_one(change: Change) -> None:
    graph = capture(lambda state, batch: (change(state, batch), state), *inputs())
    state, batch = inputs()
    found, after, _ = Program(graph)(state, batch)
    assert torch.equal(state, inputs()[0])
    expected = change(state, batch)
    assert torch.equal(found, expected) and torch.equal(after, state)


@pytest.mark.parametrize("change", [*RESOLVED, *LEFT], ids=lambda change: change.__name__)
def test_only_what_a_cell_cannot_express_is_left_to_functionalisation(change: Change) -> None:
    mode, recorder = fake_mode(), Recorder(note_call)
    fakes = [mode.from_tensor(tensor) for tensor in inputs()]
    for name, fake in zip("xy", fakes, strict=True):
        recorder.placeholder(name, fake)
    with mode, recorder:
        change(*fakes)
    assert bool(recorder.num_unresolved) == (change in LEFT)


def test_batch_norm_and_dropout_are_recorded_once() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    mode, recorder = fake_mode(), Recorder(note_call)
    fakes: dict[str, Tensor] = {name: mode.from_tensor(tensor.detach()) for name, tensor in module.state_dict().items()}
    x = mode.from_tensor(torch.ones(4, 3))
    for name, fake in (*fakes.items(), ("x", x)):
        recorder.placeholder(name.replace(".", "_"), fake)
    with mode, recorder:
        torch.func.functional_call(module, fakes, (x,))
    assert recorder.num_unresolved == 0
    assert recorder.cell(fakes["0.running_mean"]).node.target is not None


def test_arguments_that_share_memory_cannot_be_written() -> None:
    whole = torch.ones(4)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        state["half"].add_(1)
        return state["whole"].sum(), state

    with pytest.raises(GraphError, match=r"memory that arguments share \(state.whole, state.half\)"):
        capture(step, {"whole": whole, "half": whole[:2]}, ())


def test_inference_mode_gives_the_operators_of_eager() -> None:
    @torch.inference_mode()
    def step(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        return nn.functional.linear(batch, state), state

    graph = capture(step, torch.ones(2, 3), torch.ones(4, 3))
    assert [operator.target for operator in graph.operators] == ["aten.t", "aten.mm"]


def test_a_returned_tensor_from_elsewhere_is_refused() -> None:
    with pytest.raises(GraphError, match="in neither its state nor its batch"):
        capture(lambda state, batch: (LEFT_OUT, state), (), torch.ones(2))


LEFT_OUT = torch.ones(2)


def test_higher_order_operator_is_refused() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
        return torch.ops.higher_order.cond(batch.sum() > 0, torch.sin, torch.cos, (batch,)), state

    with pytest.raises(GraphError, match="cannot hold"):
        capture(step, (), torch.ones(2))
