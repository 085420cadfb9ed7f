"""Define-by-run: what is executed is recorded, and runs again with the same bits."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import GraphError
from weft.graph import Program, grad, record, rewrite


def copied(state: Any) -> Any:
    return {part: {name: t.detach().clone() for name, t in tensors.items()} for part, tensors in state.items()}


def test_a_plain_training_step_with_an_optimizer_of_torch_becomes_a_graph() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.randn(5, 3), "y": torch.randn(5, 1)}
    state = {"parameters": dict(module.named_parameters()), "buffers": dict(module.named_buffers())}
    before, random = copied(state), torch.get_rng_state()
    with record(state, batch) as recording:
        loss = nn.functional.mse_loss(module(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
    graph = recording.graph({"loss": loss}, state)
    outputs, after, _ = Program(rewrite(graph))(before, batch, random)
    assert torch.equal(outputs["loss"], loss)
    assert all(torch.equal(after[part][n], t) for part, tensors in copied(state).items() for n, t in tensors.items())
    assert {operator.role for operator in graph.operators} == {"forward", "backward", "update"}
    assert all(operator.line.startswith("test_define_by_run.py:") for operator in graph.operators)


def test_values_are_there_and_may_decide() -> None:
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with record(w, x) as recording:
        y = w * x
        if y.sum() > 10:
            y = y / y.sum().item()
        w += y
    assert torch.equal(y, torch.tensor([3.0, 8.0]) / 11)
    program = Program(recording.graph(y, w))
    found, after, _ = program(torch.tensor([0.0, 1.0]), x)
    assert torch.equal(found, torch.tensor([0.0, 4.0]) / 11) and torch.equal(after, torch.tensor([0.0, 1.0]) + found)


def test_a_recorded_graph_is_extended() -> None:
    w, x = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with record(w, x) as recording:
        loss = (w * x).square().sum()
    graph = grad(recording.graph({"loss": loss}, w), "outputs.loss", ["state"])
    assert torch.equal(Program(graph)(w, x)[0]["gradients"]["state"], 2 * w * x * x)


def test_recording_may_go_on_after_a_graph_was_made() -> None:
    w = torch.ones(2)
    with record(w, ()) as recording:
        y = w + 1
        first = recording.graph(y, w)
        z = y * 2
    assert [len(graph.operators) for graph in (first, recording.graph(z, w))] == [1, 2]


def test_recording_holds_no_values() -> None:
    w = torch.ones(2)
    with record(w, ()) as recording:
        y = w + 1
        gone = weakref.ref(y)
        z = y * 2
        del y
    assert gone() is None and recording.graph(z, w) is not None


def test_a_constant_is_kept_as_it_was_made() -> None:
    w = torch.ones(2)
    with record(w, ()) as recording:
        c = torch.tensor([1.0, 2.0])
        y = w + c
        c.zero_()
        z = w + c
    found = Program(recording.graph((y, z), w))(w, ())[0]
    assert torch.equal(found[0], torch.tensor([2.0, 3.0])) and torch.equal(found[1], w)


def test_recording_that_could_not_run_again_is_refused() -> None:
    w, elsewhere = torch.tensor([1.0, -2.0]), torch.ones(2)
    with record(w, ()) as recording:
        positive = w[w > 0]
        lost = w.clone()
    with pytest.raises(GraphError, match=r"depends on the values of a tensor \(test_define_by_run.py:\d+\)"):
        recording.graph(positive, w)
    with pytest.raises(GraphError, match="in neither its state nor its batch"):
        recording.graph(elsewhere, w)
    with record(w, ()) as recording, pytest.raises(GraphError, match="in neither its state nor its batch"):
        lost = w + elsewhere
    assert isinstance(lost, Tensor)


def test_a_write_that_is_not_returned_is_refused() -> None:
    w, v = torch.ones(2), torch.zeros(2)
    with record({"w": w, "v": v}, ()) as recording:
        w.add_(1)
    with pytest.raises(GraphError, match="writes in place to what it does not return"):
        recording.graph(w, {"w": v, "v": v})
