"""How large an expression is if nothing cancels: the scale of its rounding errors."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.graph import Graph, Operator
from weft.graph.ir.interpreter import replay

__all__ = ["bound_of", "num_operations"]

aten = torch.ops.aten


def _size(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) else abs(value) if isinstance(value, (int, float)) else value


def _norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *settings: Any) -> tuple[Tensor]:
    gamma, beta, shift, scale = (t.view(-1, 1, 1) for t in (weight, bias, mean, variance.rsqrt()))
    return ((x + shift) * scale * gamma + beta,)


MAGNITUDES: Mapping[Any, Callable[..., Any]] = {
    aten.sub.Tensor: torch.add,
    aten.rsub.Scalar: torch.add,
    aten.neg.default: lambda x: x,
    aten.native_batch_norm.default: _norm,
}
"""Operators whose value on magnitudes is not the magnitude; all others are themselves."""


def bound_of(graph: Graph, inputs: Sequence[Tensor], num_operations: int) -> list[Tensor]:
    """m eps M for each result: see docs/rewrites.md."""
    copy = graph.edited()
    for node in copy.nodes.nodes:
        node.target = MAGNITUDES.get(node.target, node.target)
        node.args = tuple(_size(value) for value in node.args)
        node.kwargs = {key: _size(value) for key, value in node.kwargs.items()}
    values = replay(copy.nodes, [_size(t) for t in inputs], lambda name: graph.constants[name].abs())
    return [torch.finfo(t.dtype).eps * num_operations * t for t in values[copy.nodes.output_node()]]


def num_operations(*graphs: Graph) -> int:
    """Operations for one element of all calls together."""
    return sum(_operations(operator) for graph in graphs for operator in graph.operators)


def _operations(operator: Operator) -> int:
    if operator.target in ("aten.mm", "aten.addmm"):
        return 2 * int(operator.node.all_input_nodes[-1].meta["val"].shape[0]) + 2
    if "convolution" in operator.target:
        return 2 * int(prod(operator.node.all_input_nodes[1].meta["val"].shape[1:])) + 2
    return 8 if "batch_norm" in operator.target else 3
