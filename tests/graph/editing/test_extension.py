"""Gradients as an extension of the graph, gradients of gradients, replaced gradients, updates of the state."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.graph.steps import descent, descent_inputs, graph_of
from weft.errors import GraphError
from weft.graph import Graph, Program, capture, extend, grad, replace_gradient, rewrite, text_of, update_state


def forward(state: Any, batch: Any) -> tuple[Any, Any]:
    hidden = (batch["x"] @ state["w1"]).tanh() * torch.tensor(0.5)
    return {"loss": (hidden @ state["w2"] - batch["y"]).square().mean(), "hidden": hidden}, state


def forward_inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return (
        {"w1": torch.randn(3, 4), "w2": torch.randn(4, 2)},
        {"x": torch.randn(5, 3), "y": torch.randn(5, 2)},
    )


def watched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}


def outputs_of(graph: Graph, state: Any, batch: Any) -> Any:
    return Program(graph)(state, batch)[0]


def test_gradients_are_those_of_autograd_to_the_bit() -> None:
    state, batch = forward_inputs()
    graph = grad(capture(forward, state, batch), "outputs.loss", ["state.w1", "state.w2", "batch.x"])
    found = outputs_of(rewrite(graph), state, batch)["gradients"]
    state, batch = watched(state), watched(batch)
    loss = forward(state, batch)[0]["loss"]
    expected = torch.autograd.grad(loss, [state["w1"], state["w2"], batch["x"]])
    for name, tensor in zip(["state.w1", "state.w2", "batch.x"], expected, strict=True):
        assert torch.equal(found[name], tensor)


def test_added_operators_are_backward_and_the_others_stay_what_they_were() -> None:
    graph = capture(forward, *forward_inputs())
    before = [(operator.target, operator.line, operator.role) for operator in graph.operators]
    after = [(o.target, o.line, o.role) for o in grad(graph, "outputs.loss", ["state.w1"]).operators]
    assert after[: len(before)] == before
    assert {role for _, _, role in after[len(before) + 1 :]} == {"backward"}


def test_a_gradient_by_a_variable_in_between() -> None:
    state, batch = forward_inputs()
    graph = grad(capture(forward, state, batch), "outputs.loss", ["outputs.hidden", "state.w1"])
    found = outputs_of(graph, state, batch)["gradients"]
    state = watched(state)
    outputs, _ = forward(state, batch)
    expected = torch.autograd.grad(outputs["loss"], [outputs["hidden"], state["w1"]])
    assert torch.equal(found["outputs.hidden"], expected[0]) and torch.equal(found["state.w1"], expected[1])


def test_the_gradient_of_a_gradient_penalty() -> None:
    """WGAN-GP: the norm of the gradient by the input enters the loss, whose gradient by the weights is taken."""
    state, batch = forward_inputs()
    graph = grad(capture(forward, state, batch), "outputs.loss", ["batch.x"])

    def penalty(slope: Tensor) -> Tensor:
        result: Tensor = (torch.linalg.vector_norm(slope, dim=1) - 1).square().mean()
        return result

    graph = extend(graph, lambda values: {"penalty": penalty(values["outputs.gradients.batch.x"])})
    found = outputs_of(rewrite(grad(graph, "outputs.penalty", ["state.w1", "state.w2"])), state, batch)
    state, batch = watched(state), watched(batch)
    (slope,) = torch.autograd.grad(forward(state, batch)[0]["loss"], batch["x"], create_graph=True)
    expected = torch.autograd.grad(penalty(slope), [state["w1"], state["w2"]])
    for name, tensor in zip(["state.w1", "state.w2"], expected, strict=True):
        torch.testing.assert_close(found["gradients"][name], tensor, rtol=1e-6, atol=1e-8)
    assert torch.equal(found["penalty"], penalty(slope))


def renamed(name: str, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: values["outputs.gradients.batch"].clone()}


@settings(max_examples=10)
@given(order=st.integers(1, 4))
def test_any_order_of_derivative(order: int) -> None:
    graph = capture(lambda state, batch: ({"d0": batch.sin().sum()}, state), (), torch.ones(()))
    for k in range(order):
        graph = grad(graph, f"outputs.d{k}", ["batch"])
        graph = extend(graph, partial(renamed, f"d{k + 1}"))
    x = torch.tensor(0.7)
    expected = [x.sin(), x.cos(), -x.sin(), -x.cos(), x.sin()][order]
    torch.testing.assert_close(outputs_of(graph, (), x)[f"d{order}"], expected)


def test_a_graph_of_a_whole_step_can_be_differentiated_through_its_update() -> None:
    """Meta-learning: the loss after one step of descent, by the weights before it."""
    state, batch = descent_inputs()
    graph = capture(descent, state, batch)
    after = extend(graph, lambda v: {"later": (v["batch.x"] @ v[graph.updates["w"]]).square().mean()})
    found = outputs_of(grad(after, "outputs.later", ["state.w"]), state, batch)["gradients"]["state.w"]
    w = state["w"].clone().requires_grad_()
    loss = (batch["x"] @ w + state["b"] - batch["y"]).square().mean()
    (slope,) = torch.autograd.grad(loss, w, create_graph=True)
    (expected,) = torch.autograd.grad((batch["x"] @ (w - 0.1 * slope)).square().mean(), w)
    torch.testing.assert_close(found, expected)


def test_a_replaced_gradient_reaches_the_update() -> None:
    state, batch = descent_inputs()
    graph = capture(descent, state, batch)
    (scaled,) = graph.variables[graph.updates["w"]].owner.inputs[1:]  # type: ignore[union-attr]
    (gradient,) = scaled.owner.inputs  # type: ignore[union-attr]
    clipped = replace_gradient(graph, gradient.name, lambda tensor: tensor.clamp(-0.01, 0.01))
    _, new, _ = Program(clipped)(state, batch)
    assert ((new["w"] - state["w"]).abs() <= 0.1 * 0.01 + 1e-7).all()
    assert not torch.equal(new["w"], state["w"])


def test_a_state_is_updated_from_an_output_and_readers_see_the_old_one() -> None:
    state, batch = forward_inputs()
    graph = grad(capture(forward, state, batch), "outputs.loss", ["state.w1"])
    graph = extend(graph, lambda v: {"new": v["state.w1"] - 0.1 * v["outputs.gradients.state.w1"]})
    updated = update_state(graph, {"state.w1": "outputs.new"})
    outputs, new, _ = Program(updated)(state, batch)
    assert torch.equal(new["w1"], outputs["new"]) and torch.equal(new["w2"], state["w2"])
    assert torch.equal(outputs["loss"], forward(state, batch)[0]["loss"])


def test_the_graph_given_is_left_as_it_was() -> None:
    graph = capture(forward, *forward_inputs())
    before = text_of(graph)
    grad(graph, "outputs.loss", ["state.w1"])
    update_state(graph, {"state.w1": "state.w1"})
    replace_gradient(graph, "outputs.hidden", lambda tensor: tensor * 2)
    assert text_of(graph) == before


def test_gradients_and_outputs_that_cannot_be_are_refused() -> None:
    graph = capture(forward, *forward_inputs())
    with pytest.raises(GraphError, match=r"no such variable.*did you mean"):
        grad(graph, "outputs.loss", ["state.w"])
    with pytest.raises(GraphError, match="of a scalar only"):
        grad(graph, "outputs.hidden", ["state.w1"])
    with pytest.raises(GraphError, match="does not depend on this"):
        grad(extend(graph, lambda v: {"other": v["state.w2"].sum()}), "outputs.other", ["state.w1", "state.w2"])
    with pytest.raises(GraphError, match="another shape"):
        replace_gradient(graph, "outputs.hidden", lambda tensor: tensor.sum())
    with pytest.raises(GraphError, match="not a place of the state"):
        update_state(graph, {"batch.x": "outputs.hidden"})
    with pytest.raises(GraphError, match="w2 changes"):
        update_state(graph, {"state.w2": "outputs.hidden"})


def test_an_operator_without_a_second_derivative_is_named() -> None:
    module = nn.MultiheadAttention(4, 1, batch_first=True)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x) * self.inner.in_proj_bias.sum()

    graph = graph_of(Attends(), torch.randn(2, 1, 3, 4), targets=torch.randn(2, 1, 3, 4))
    once = grad(graph, "outputs.loss", ["batch.inputs.0"])
    squared = extend(once, lambda v: {"norm": v["outputs.gradients.batch.inputs.0"].square().sum()})
    with pytest.raises(GraphError, match="no derivative"):
        grad(squared, "outputs.norm", ["batch.inputs.0"])
