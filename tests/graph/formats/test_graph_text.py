"""The operator/variable view, as objects, as text and as a drawing."""

import xml.etree.ElementTree as ElementTree

import torch
from torch import nn

from tests.graph.steps import descent, descent_inputs, graph_of
from weft.graph import capture, svg_of, text_of


def test_operators_and_variables_know_each_other() -> None:
    graph = capture(descent, *descent_inputs())
    for operator in graph.operators:
        assert all(variable.owner is operator for variable in operator.outputs)
        assert all(operator in variable.readers for variable in operator.inputs)
    for variable in graph.variables.values():
        assert variable.owner is None or variable in variable.owner.outputs
        assert all(variable in reader.inputs for reader in variable.readers)


def test_a_variable_has_a_type_a_shape_and_a_role() -> None:
    graph = capture(descent, *descent_inputs())
    w, step = graph.variables["w"], graph.variables["step"]
    assert (w.shape, w.dtype, w.role, w.path) == ((3, 2), torch.float32, "state", "state.w")
    assert step.dtype == torch.int64
    assert graph.variables["x"].role == "batch"
    assert graph.variables[graph.updates["w"]].role == "update"
    assert graph.variables[graph.outputs["loss"]].role == "forward"


def test_an_operator_of_several_outputs_owns_each() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    graph = graph_of(module, torch.ones(3, 2), targets=torch.ones(3, 2))
    (norm,) = (operator for operator in graph.operators if operator.target == "aten.native_layer_norm")
    assert [variable.shape for variable in norm.outputs] == [(3, 2), (3, 1), (3, 1)]
    assert not any("getitem" in operator.target for operator in graph.operators)


def test_a_gradient_penalty_is_forward_between_two_backwards() -> None:
    def step(state: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w, x = state.detach().requires_grad_(), batch.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
            penalty = (slope.norm() - 1).square()
            (gradient,) = torch.autograd.grad(penalty, w)
        return penalty.detach(), state - gradient

    graph = capture(step, torch.randn(3, 2), torch.randn(4, 3))
    roles = [operator.role for operator in graph.operators]
    assert [role for role, before in zip(roles, ["", *roles], strict=False) if role != before] == [
        *("forward", "backward", "forward", "backward", "update")
    ]


def test_lines_of_the_users_code_are_noted() -> None:
    lines = {operator.line for operator in capture(descent, *descent_inputs()).operators}
    first = descent.__code__.co_firstlineno
    assert lines <= {f"steps.py:{number}" for number in range(first, first + 10)} and len(lines) > 2


def test_the_text_names_every_operator_and_every_result() -> None:
    graph = capture(descent, *descent_inputs())
    text = text_of(graph)
    assert text.startswith("6 forward, 9 backward, 5 update operators")
    for operator in graph.operators:
        assert f"{operator.target}(" in text and operator.line in text
    assert f"state.w                  = {graph.updates['w']}" in text


def test_the_drawing_has_a_box_for_each_operator_below_its_inputs() -> None:
    graph = capture(descent, *descent_inputs())
    drawing = ElementTree.fromstring(svg_of(graph))
    boxes = {}
    for group in drawing.iter("{http://www.w3.org/2000/svg}g"):
        texts = [element.text for element in group.findall("{http://www.w3.org/2000/svg}text")]
        if texts:
            (rectangle,) = group.findall("{http://www.w3.org/2000/svg}rect")
            boxes[texts[1]] = float(rectangle.attrib["y"])
    for operator in graph.operators:
        owners = [variable.owner for variable in operator.inputs if variable.owner is not None]
        assert all(boxes[operator.name] > boxes[owner.name] for owner in owners)
