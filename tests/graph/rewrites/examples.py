"""The examples of docs/rewrites.md as data, graphs made of them, and their values on awkward numbers."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph import Graph, Variable, capture
from weft.graph.ir.interpreter import replay
from weft.graph.rewrites import EXACT, REASSOCIATING, Rule

__all__ = [
    "EXAMPLES",
    "RULES",
    "Example",
    "awkward",
    "bits_of",
    "graph_of",
    "plain_numbers",
    "shape_of_graph",
    "values_of",
]

DOCUMENT = Path(__file__).parents[3] / "docs" / "rewrites.md"
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (*EXACT, *REASSOCIATING)}
_ROW = re.compile(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \| ([^|]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A row of a table: an expression, and what a rule makes of it."""

    rule: str
    before: str
    after: str


EXAMPLES = tuple(Example(*row[:3]) for row in _ROW.findall(DOCUMENT.read_text(encoding="utf-8")))

SHAPES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys("xyz", (4, 4)),
    **dict.fromkeys("ab", (4,)),
    "big": (256, 64),
    "row": (64,),
    "u": (8, 3, 32, 32),
    "w": (5, 3, 3, 3),
    **dict.fromkeys("cdef", (5,)),
}


def names_in(expression: str) -> list[str]:
    """The inputs that an expression uses.

    >>> names_in("torch.add(x, row * 2)")
    ['row', 'x']
    """
    return sorted(set(re.findall(r"(?<![.\w])\w+", expression)) & SHAPES.keys())


def value(expression: str, inputs: Mapping[str, Tensor]) -> Tensor:
    wider = torch.float64
    found: Tensor = eval(expression, {"torch": torch, "wider": wider, **inputs})
    return found


def graph_of(
    expression: str, dtype: torch.dtype = torch.float32, *, result: Callable[[Tensor], Any] = torch.sin
) -> Graph:
    """The graph of an expression of the documentation. Its value is not a result itself: that would not be shared."""
    batch = {name: torch.ones(SHAPES[name], dtype=dtype) for name in names_in(expression)}
    return capture(lambda state, batch: (result(value(expression, batch)), state), (), batch)


def values_of(graph: Graph, inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """The results, operator by operator, and the state of the random generator afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        results = replay(graph.nodes, inputs, graph.constants.__getitem__)[graph.nodes.output_node()]
        return [*results, torch.get_rng_state()]


def bits_of(values: Sequence[Tensor]) -> list[bytes]:
    """The bits, with one NaN for all: its sign and payload mean nothing."""
    plain = (v.contiguous() for v in values)
    one_nan = (torch.where(v.isnan(), torch.full_like(v, nan), v) if v.is_floating_point() else v for v in plain)
    return [v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in one_nan]


def shape_of_graph(graph: Graph) -> list[tuple[object, ...]]:
    """Operators with their literals and the shapes that they read and make, without the names of variables."""
    return [
        (o.target, [a for a in o.node.args if not isinstance(a, fx.Node)], o.node.kwargs, *_shapes(o.inputs, o.outputs))
        for o in graph.operators
    ]


def _shapes(*variables: Sequence[Variable]) -> list[list[tuple[object, ...]]]:
    return [[variable.shape for variable in part] for part in variables]


@cache
def _awkward_numbers(dtype: torch.dtype) -> tuple[float, ...]:
    info = torch.finfo(dtype)
    return (
        *(0.0, -0.0, 1.0, -1.0, inf, -inf, nan, info.max, -info.max, info.tiny),
        *(info.tiny / 8, -info.tiny / 64, 1 + info.eps, 3.14159, -0.1, 1e3),
    )


def awkward(graph: Graph, seed: int = 0) -> list[Tensor]:
    """Inputs full of zeros of both signs, infinities, NaN, subnormal and huge numbers, in a random order."""
    chooser = random.Random(seed)
    return [
        _filled(node.meta["val"], lambda dtype: chooser.choice(_awkward_numbers(dtype))) for node in graph.placeholders
    ]


def plain_numbers(graph: Graph, seed: int = 0) -> list[Tensor]:
    """Inputs without surprises, positive and negative, none near zero."""
    chooser = random.Random(seed)
    draw = lambda _dtype: chooser.choice((-1, 1)) * chooser.uniform(0.5, 2)  # noqa: E731
    return [_filled(node.meta["val"], draw) for node in graph.placeholders]


def _filled(like: Tensor, draw: Callable[[torch.dtype], float]) -> Tensor:
    numbers = [draw(like.dtype) for _ in range(like.numel())]
    return torch.tensor(numbers, dtype=like.dtype).reshape(like.shape)
