"""Edits: operators and variables added, removed and replaced; what would break the graph is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.steps import descent, descent_inputs, graph_of
from weft.errors import GraphError
from weft.graph import (
    Graph,
    Program,
    add_input,
    add_operator,
    add_output,
    capture,
    check_shapes,
    remove_input,
    remove_operator,
    remove_output,
    replace_operator,
    replace_variable,
    rewrite,
    update_state,
)

aten = torch.ops.aten


def fresh() -> Graph:
    return capture(descent, *descent_inputs())


def test_a_norm_is_added_and_returned() -> None:
    graph = fresh()
    gradient = next(o for o in graph.operators if o.role == "backward" and o.target == "aten.mm")
    graph, norm = add_operator(graph, aten.linalg_vector_norm.default, gradient.outputs[0], line="here.py:1")
    graph = add_output(graph, "outputs.norms.w", norm.outputs[0])
    check_shapes(graph)
    state, batch = descent_inputs()
    outputs, _, _ = Program(graph)(state, batch)
    w = state["w"].requires_grad_()
    (expected,) = torch.autograd.grad((batch["x"] @ w + state["b"] - batch["y"]).square().mean(), w)
    assert torch.allclose(outputs["norms"]["w"], expected.norm())
    assert graph.operators[-1].line == "here.py:1" and graph.variables[norm.name].readers == ()


def test_every_output_of_an_operator_is_a_variable() -> None:
    graph, both = add_operator(fresh(), aten.max.dim, fresh().variables["x"], 1)
    assert [variable.dtype for variable in both.outputs] == [torch.float32, torch.int64]
    graph = add_output(graph, "outputs.where", both.outputs[1])
    state, batch = descent_inputs()
    assert torch.equal(Program(graph)(state, batch)[0]["where"], batch["x"].argmax(1))


def test_an_operator_is_replaced_by_one_of_the_same_shape() -> None:
    graph = fresh()
    power = next(o for o in graph.operators if o.target == "aten.pow.Tensor_Scalar" and o.role == "forward")
    after = replace_operator(graph, power.name, aten.abs.default, power.inputs[0])
    assert power.name not in {o.name for o in after.operators}
    state, batch = descent_inputs()
    outputs, _, _ = Program(after)(state, batch)
    assert torch.equal(outputs["loss"], (batch["x"] @ state["w"] + state["b"] - batch["y"]).abs().mean())
    with pytest.raises(GraphError, match=r"another shape or type \(pow_1"):
        replace_operator(graph, power.name, aten.sum.default, power.inputs[0])


def test_several_outputs_are_replaced_together() -> None:
    graph = capture(lambda state, batch: (tuple(torch.max(batch, 1)), state), (), torch.tensor([[1.0, 3.0]]))
    after = replace_operator(graph, graph.operators[0].name, aten.min.dim, graph.variables["batch"], 1)
    values, where = Program(after)((), torch.tensor([[1.0, 3.0]]))[0]
    assert (values.item(), where.item()) == (1.0, 0)


def test_a_variable_is_read_in_the_place_of_another() -> None:
    graph = capture(lambda state, batch: ({"y": batch["a"] * 2 + batch["b"]}, state), (), pair())
    after = replace_variable(graph, graph.variables["a"], graph.variables["b"])
    assert torch.equal(Program(after)((), pair())[0]["y"], torch.full((2,), 15.0))
    after = remove_input(after, "batch.a")
    assert torch.equal(Program(after)((), {"b": pair()["b"]})[0]["y"], torch.full((2,), 15.0))


def pair() -> dict[str, Any]:
    return {"a": torch.full((2,), 3.0), "b": torch.full((2,), 5.0)}


def test_a_mask_is_added_as_an_input() -> None:
    graph = capture(lambda state, batch: ({"y": batch["a"] + batch["b"]}, state), (), pair())
    graph, mask = add_input(graph, "batch.mask", torch.ones(2))
    graph, masked = add_operator(graph, aten.mul.Tensor, graph.variables["add"], mask)
    graph = add_output(remove_output(graph, "outputs.y"), "outputs.y", masked.outputs[0])
    outputs, _, _ = Program(graph)((), {**pair(), "mask": torch.tensor([0.0, 1.0])})
    assert torch.equal(outputs["y"], torch.tensor([0.0, 8.0]))


def test_what_nobody_reads_is_removed() -> None:
    graph, added = add_operator(fresh(), aten.mul.Tensor, fresh().variables["x"], 2)
    assert len(remove_operator(graph, added.name).operators) == len(fresh().operators)
    without = rewrite(remove_output(fresh(), "outputs.loss"))
    assert "aten.mean" not in [o.target for o in without.operators] and without.updates == rewrite(fresh()).updates


def test_edits_follow_symbolic_sizes() -> None:
    graph = capture(lambda state, batch: ({"y": batch + 1}, state), (), torch.ones(4, 2), dynamic="batch")
    graph, total = add_operator(graph, aten.sum.dim_IntList, graph.variables["add"], [1])
    graph = add_output(graph, "outputs.total", total.outputs[0])
    assert str(total.outputs[0].shape) == "(batch,)"
    assert torch.equal(Program(graph)((), torch.ones(7, 2))[0]["total"], torch.full((7,), 4.0))


def test_an_added_variable_updates_the_state() -> None:
    graph, half = add_operator(fresh(), aten.div.Tensor, fresh().variables["w"], 2)
    state, batch = descent_inputs()
    _, after, _ = Program(update_state(graph, {"state.w": half.outputs[0].name}))(state, batch)
    assert torch.equal(after["w"], state["w"] / 2)


def dropout() -> Graph:
    return graph_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.ones(1, 2), targets=torch.ones(1, 2))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "read": (lambda: remove_operator(fresh(), "mm"), r"operator is read \(mm, by: add"),
    "returned": (lambda: remove_operator(fresh(), "mean"), "by: .*a result"),
    "random": (lambda: remove_operator(dropout(), "bernoulli"), "must stay"),
    "random replaced": (lambda: replace_operator(dropout(), "bernoulli", aten.ones.default, [1, 2]), "must stay"),
    "unknown operator": (lambda: remove_operator(fresh(), "mmm"), "no such operator"),
    "unknown variable": (
        lambda: add_operator(fresh(), aten.abs.default, dropout().variables["addmm"]),
        "no such variable",
    ),
    "no operator": (lambda: add_operator(fresh(), torch.abs, fresh().variables["x"]), "not an operator"),
    "writes": (lambda: add_operator(fresh(), aten.abs_.default, fresh().variables["x"]), "not an operator"),
    "wrong arguments": (lambda: add_operator(fresh(), aten.mm.default, fresh().variables["x"]), "cannot be called"),
    "wrong shapes": (
        lambda: add_operator(fresh(), aten.mm.default, fresh().variables["x"], fresh().variables["x"]),
        "cannot be called",
    ),
    "later variable": (
        lambda: replace_variable(fresh(), fresh().variables["w"], fresh().variables[fresh().updates["w"]]),
        "before it is made",
    ),
    "other shape": (lambda: replace_variable(fresh(), fresh().variables["x"], fresh().variables["w"]), "another shape"),
    "input of the state": (lambda: add_input(fresh(), "state.v", torch.ones(2)), "added to the batch"),
    "input that is there": (lambda: add_input(fresh(), "batch.x", torch.ones(2)), "something already"),
    "input that is read": (lambda: remove_input(fresh(), "batch.x"), "input is read"),
    "unknown input": (lambda: remove_input(fresh(), "batch.z"), "no such input"),
    "output of the state": (
        lambda: add_output(fresh(), "state.v", fresh().variables["w"]),
        "not a place of the outputs",
    ),
    "unknown output": (lambda: remove_output(fresh(), "outputs.z"), "no such output"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_edit_that_cannot_be_is_refused(name: str) -> None:
    edit, fault = REFUSED[name]
    with pytest.raises(GraphError, match=fault):
        edit()
