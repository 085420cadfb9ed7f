"""The table of ATen operators that JAX computes here; random ones get torch's own numbers.

A random operator is drawn by torch before the graph runs, in the order of the graph, and its result is an input: so
dropout has the bits of eager mode, and XLA's own generators are never used.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jax import Array
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import call_of
from weft.graph.ir.side_effects import is_random
from weft.graph.jax import elementwise, layers, losses, products, reductions, shapes

__all__ = ["OPERATORS", "apply_drawn", "check_supported", "draw", "is_drawn"]

OPERATORS: Mapping[str, Callable[..., Any]] = {
    **elementwise.TABLE,
    **shapes.TABLE,
    **reductions.TABLE,
    **products.TABLE,
    **layers.TABLE,
    **losses.TABLE,
}

_DROPOUT = "aten.native_dropout.default"
_DRAWN = {  # results, or the mask of dropout, depend on shapes and probabilities, not on values
    _DROPOUT,
    "aten.bernoulli.p",
    "aten.rand.default",
    "aten.rand_like.default",
    "aten.randn.default",
    "aten.randn_like.default",
}


def check_supported(graph: Graph) -> None:
    """Refuse a graph with an operator that is in no table, with its line."""
    for operator in graph.operators:
        name = str(operator.node.target)
        where = f"operator: {name}, line: {operator.line or 'unknown'}"
        if name not in OPERATORS and name not in _DRAWN:
            kind = "random operator" if is_random(operator.node) else "operator"
            raise GraphError(f"JAX executor has no such {kind} ({where}); use executor=graph")


def is_drawn(node: fx.Node) -> bool:
    """Whether torch draws something for this operator."""
    return str(node.target) in _DRAWN


def draw(node: fx.Node) -> Tensor:
    """Draw from torch's default generator for a random operator: its result, or dropout's mask."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _of_no_value(source.meta["val"]))
    drawn = call_of(node)(*args, **kwargs)
    result: Tensor = drawn[1] if str(node.target) == _DROPOUT else drawn
    return result


def apply_drawn(node: fx.Node, args: tuple[Any, ...], drawn: Array) -> Any:
    """The operator's result, from what was drawn for it."""
    if str(node.target) != _DROPOUT:
        return drawn
    x, probability = args[0], float(args[1])
    kept = 1 / (1 - probability) if probability < 1 else 0.0
    return x * drawn * (kept if args[2] is not False else 1.0), drawn


def _of_no_value(like: Any) -> Tensor:
    return torch.ones(like.shape, dtype=like.dtype)
