"""The first difference between two programs, replayed on the same values one operator after the other.

    reference   x -> mm -> add -> tanh -> ...        every value is kept
    subject          mm'   add'   tanh'              each computed from the reference's inputs: errors do not add up
                      =      =     differs: reported

Operators are matched by name, which rewrites keep where they keep the operator. A rewrite may also give a name to
another value. So a call that is not the reference's, to the letter, is reported only if the reference's value in its
place mends the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.ir.graph import Graph, owner_of
from weft.graph.ir.interpreter import replay
from weft.graph.ir.side_effects import is_random
from weft.graph.programs.program import AbstractProgram

__all__ = ["Difference", "first_difference", "relative_error"]


@dataclass(frozen=True)
class Difference:
    """An output of an operator that is not what it should be. The error is relative to the output's largest value."""

    operator: str  # its name: `tanh_1`
    target: str  # `aten.tanh`
    output: str  # the variable
    line: str  # `model.py:12`, empty where unknown
    error: float
    place: str  # the index of the largest error: `[3, 2]`

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        output = f"{self.output}{self.place}"
        return f"{self.operator} ({self.target}{where}), whose output {output} is off by {self.error:.3g}"


def first_difference(
    subject: AbstractProgram,
    reference: AbstractProgram,
    inputs: Sequence[Tensor],
    expected_inputs: Sequence[Tensor],
    random: Tensor,
    tolerance: float = 0.0,
) -> Difference | None:
    """The first operator of the subject that differs from the reference's of that name.

    Args:
        inputs: values of the subject's placeholders.
        expected_inputs: those of the reference, which may be of another floating-point type.
        random: the state of the generator at the start.
        tolerance: the relative error that is no difference.

    Returns:
        The difference; None if each operator alone agrees.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        run = _ReferenceRun(reference, expected_inputs)
        suspects = []
        for node, found in _computed_alone(subject, inputs, run):
            difference = _difference(subject.graph, node, found, run.values[node.name], tolerance)
            if difference is not None:
                if run.has_call(node) or _is_mended(subject, inputs, run, node, tolerance):
                    return difference
                suspects.append(difference)
        return suspects[0] if suspects else None


class _ReferenceRun:
    """Every value of the reference by name, and the random state before each operator that draws."""

    def __init__(self, program: AbstractProgram, inputs: Sequence[Tensor]) -> None:
        self.random: dict[str, Tensor] = {}

        def before(node: fx.Node) -> None:
            if is_random(node):
                self.random[node.name] = torch.get_rng_state()

        graph = program.graph
        values = replay(graph.nodes, inputs, graph.constants.__getitem__, before=before, call=program.compute)
        self.values: dict[str, Any] = {node.name: value for node, value in values.items() if node.op != "output"}
        self.results: Sequence[Any] = values[graph.nodes.output_node()]
        self._calls = {node.name: _call_of(node) for node in values}

    def has_call(self, node: fx.Node) -> bool:
        """Whether the reference calls the same operator with the same arguments, by their names."""
        owner = owner_of(node)
        return self._calls.get(owner.name) == _call_of(owner)

    def like(self, node: fx.Node, found: Any) -> Any:
        """The reference's value for a node, in the type of the one found; the found one where there is none."""
        return _cast(self.values.get(node.name, found), found)


def _call_of(node: fx.Node) -> str:
    return f"{node.target}{node.args}{node.kwargs}"


Found = tuple[fx.Node, Any]


def _computed_alone(subject: AbstractProgram, inputs: Sequence[Tensor], run: _ReferenceRun) -> list[Found]:
    """The value that each of the subject's operators computes from the reference's, for those that have a namesake."""
    found: list[Found] = []

    def after(node: fx.Node, value: Any) -> Any:
        if node.op == "call_function" and node.name in run.values and _is_tensor(node):
            found.append((node, value))
        return run.like(node, value) if _fits(value, run.values.get(node.name)) else value

    _replay(subject, inputs, run, after)
    return found


def _is_mended(
    subject: AbstractProgram, inputs: Sequence[Tensor], run: _ReferenceRun, node: fx.Node, tolerance: float
) -> bool:
    """Whether the results are the reference's once the node's value is."""

    def distance(after: Callable[[fx.Node, Any], Any]) -> float:
        results = _replay(subject, inputs, run, after)[subject.graph.nodes.output_node()]
        pairs = [(a, b) for a, b in zip(results, run.results, strict=False) if isinstance(a, Tensor)]
        return max((relative_error(a, b)[0] for a, b in pairs if isinstance(b, Tensor)), default=0.0)

    as_it_is = distance(lambda _node, value: value)
    mended = distance(lambda other, value: run.like(other, value) if other is node else value)
    return mended <= tolerance or mended < 0.1 * as_it_is


def _replay(
    subject: AbstractProgram,
    inputs: Sequence[Tensor],
    run: _ReferenceRun,
    after: Callable[[fx.Node, Any], Any],
) -> Mapping[fx.Node, Any]:
    def before(node: fx.Node) -> None:
        if node.name in run.random:
            torch.set_rng_state(run.random[node.name])

    graph = subject.graph
    return replay(graph.nodes, inputs, graph.constants.__getitem__, before=before, after=after, call=subject.compute)


def _difference(graph: Graph, node: fx.Node, found: Any, expected: Any, tolerance: float) -> Difference | None:
    if not _fits(found, expected):
        return None
    error, place = relative_error(found, expected)
    if error <= tolerance:
        return None
    variable = graph.variables[node.name]
    owner = variable.owner
    assert owner is not None
    return Difference(owner.name, owner.target, variable.name, owner.line, error, place)


def relative_error(found: Tensor, expected: Tensor, floor: float = 0.0) -> tuple[float, str]:
    """The largest difference over the largest expected value (or `floor`, if that is more), and its index.

    Two values that are both NaN, or the same infinity, do not differ; two of different shape differ without end.

    >>> relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    (0.25, '[1]')
    """
    if found.shape != expected.shape:
        return float("inf"), ""
    if expected.numel() == 0 or torch.equal(found, expected):
        return 0.0, ""
    found, expected = found.detach().double(), expected.detach().double()
    difference = (found - expected).abs()
    difference[(found == expected) | (found.isnan() & expected.isnan())] = 0.0
    difference[difference.isnan()] = torch.inf
    position = int(difference.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(position), expected.shape)]
    largest = float(torch.where(expected.isfinite(), expected.abs(), 0.0).max())
    scale = max(largest, floor, float(torch.finfo(torch.float32).tiny))
    return float(difference.flatten()[position]) / scale, str(where)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _fits(found: Any, expected: Any) -> bool:
    """Whether two values are tensors of one shape, so that one can stand for the other."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.shape == expected.shape and found.is_floating_point() == expected.is_floating_point()
    return False


def _cast(value: Any, like: Any) -> Any:
    """A tensor in the type and the layout of another, where the two fit."""
    if not _fits(value, like) or (value.dtype, value.stride()) == (like.dtype, like.stride()):
        return value
    if like.numel() and any(stride == 0 for stride in like.stride()):
        return value.to(like.dtype)
    return torch.empty_like(like).copy_(value)
