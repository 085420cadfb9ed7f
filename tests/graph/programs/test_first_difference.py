"""Finding the operator that differs: planted ones are named, rewrites that only rename are not."""

from collections.abc import Callable, Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor, fx, nn

from tests.graph.steps import graph_of, plain
from weft.graph import AbstractProgram, Difference, Graph, TapeProgram, capture, first_difference, relative_error
from weft.graph.ir.pytree import flatten_as
from weft.graph.programs.program import Sink

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(0).get_state()


@final
class Altered(AbstractProgram):
    """A program that changes what one operator gives."""

    def __init__(self, graph: Graph, name: str, change: Callable[[Any], Any]) -> None:
        super().__init__(graph)
        self._inner, self._name, self._change = TapeProgram(graph), name, change

    def step(self, inputs: Sequence[Tensor], sink: Sink) -> list[Any]:
        raise NotImplementedError

    def compute(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        value = self._inner.compute(node, args, kwargs)
        return self._change(value) if node.name == self._name else value


def network() -> tuple[Graph, list[Tensor]]:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    inputs, targets = torch.randn(5, 4), torch.randn(5, 3)
    graph = graph_of(module, inputs, targets=targets)
    given = {"state": plain(module), "batch": {"inputs": (inputs,), "targets": (targets,)}}
    return graph, flatten_as(graph.arguments, given, len(graph.placeholders))


def found_in(subject: AbstractProgram, graph: Graph, inputs: list[Tensor], tolerance: float = 0.0) -> Difference | None:
    return first_difference(subject, TapeProgram(graph), inputs, inputs, RANDOM, tolerance)


def test_equal_programs_do_not_differ() -> None:
    graph, inputs = network()
    assert found_in(TapeProgram(graph), graph, inputs) is None


@pytest.mark.parametrize("name", ["addmm", "tanh", "mse_loss", "mm", "tanh_backward", "sum_1"])
def test_a_planted_operator_is_named(name: str) -> None:
    graph, inputs = network()
    if name not in graph.variables:
        pytest.fail(f"{name} is not in the graph: {list(graph.variables)}")
    difference = found_in(Altered(graph, name, lambda value: value * 1.5), graph, inputs)
    assert difference is not None
    assert (difference.operator, difference.output) == (name, name)
    assert difference.target == graph.variables[name].owner.target  # type: ignore[union-attr]
    assert difference.error == pytest.approx(0.5)
    assert difference.line in str(difference) and name in str(difference)


def test_the_output_of_several_is_named() -> None:
    graph, inputs = network()
    node = next(n for n in graph.nodes.nodes if n.target is aten.native_layer_norm.default)
    outputs = [user.name for user in sorted(node.users, key=lambda user: user.args[1])]
    subject = Altered(graph, node.name, lambda value: (value[0], value[1], value[2] + 1))
    difference = found_in(subject, graph, inputs)
    assert difference is not None and (difference.operator, difference.output) == (node.name, outputs[2])


def test_an_operator_changed_in_the_graph_is_named() -> None:
    graph, inputs = network()
    changed = graph.edited()
    node = next(n for n in changed.nodes.nodes if n.target is aten.tanh.default)
    node.target = aten.sigmoid.default
    difference = found_in(TapeProgram(changed), graph, inputs)
    assert difference is not None and difference.target == "aten.sigmoid" and difference.output == "tanh"


def test_errors_do_not_add_up() -> None:
    """Each operator is computed from the reference's values: a wide tolerance at the end hides nothing before it."""
    graph, inputs = network()
    assert found_in(Altered(graph, "tanh", lambda value: value + 1e-6), graph, inputs, tolerance=1e-4) is None
    difference = found_in(Altered(graph, "tanh", lambda value: value + 1e-3), graph, inputs, tolerance=1e-4)
    assert difference is not None and difference.operator == "tanh"


def test_a_name_that_stands_for_another_value_is_not_blamed() -> None:
    def left(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        return ((batch + 1) + 2).exp() * 2, state

    def right(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        return ((batch + 2) + 1).exp() * 3, state  # the sums in another order, and a wrong factor

    x = torch.arange(4.0)
    reference, subject = (TapeProgram(capture(step, (), x)) for step in (left, right))
    difference = first_difference(subject, reference, [x], [x], RANDOM)
    assert difference is not None and difference.operator == "mul"


def test_what_is_random_is_drawn_alike() -> None:
    graph = capture(lambda state, batch: (torch.rand_like(batch) + torch.rand_like(batch), state), (), torch.ones(3))
    inputs = [torch.ones(3)]
    assert first_difference(TapeProgram(graph), TapeProgram(graph), inputs, inputs, RANDOM) is None
    short = graph.edited()  # draws once where the reference draws twice
    first, second = (n for n in short.nodes.nodes if n.target is aten.rand_like.default)
    second.replace_all_uses_with(first)
    difference = first_difference(TapeProgram(short), TapeProgram(graph), inputs, inputs, RANDOM)
    assert difference is not None and difference.operator == "add"


def test_a_reference_of_another_type_is_compared() -> None:
    graph, inputs = network()
    double = [tensor.double() for tensor in inputs]
    exact = TapeProgram(graph)  # computes in the type of its inputs
    assert first_difference(TapeProgram(graph), exact, inputs, double, RANDOM, tolerance=1e-5) is None
    difference = first_difference(TapeProgram(graph), exact, inputs, double, RANDOM, tolerance=0.0)
    assert difference is not None and 0 < difference.error < 1e-5


@pytest.mark.parametrize(
    ("found", "expected", "error", "place"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, ""),
        ([1.0, 3.0], [1.0, 4.0], 0.25, "[1]"),
        ([float("nan")], [float("nan")], 0.0, "[0]"),
        ([float("nan"), 1.0], [0.0, 1.0], float("inf"), "[0]"),
        ([float("inf")], [float("inf")], 0.0, ""),
        ([float("inf")], [1.0], float("inf"), "[0]"),
    ],
)
def test_relative_errors(found: list[float], expected: list[float], error: float, place: str) -> None:
    assert relative_error(torch.tensor(found), torch.tensor(expected)) == (error, place)


def test_a_floor_takes_the_place_of_a_small_scale() -> None:
    assert relative_error(torch.tensor([2e-3]), torch.tensor([1e-3]), floor=1.0)[0] == pytest.approx(1e-3)


def test_other_shapes_differ_without_end() -> None:
    assert relative_error(torch.ones(3), torch.ones(3, 1)) == (float("inf"), "")
