"""A region as C++ that has the bits of ATen: which operators can be in it, and its source.

    for each element i:    load all inputs --> one function of operators.h an operator --> store all outputs

Loads come before stores, so an output may lie in the memory of an input.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.fusion import Region
from weft.graph.ir.memory_layout import fills_memory, has_known_shape, layout_of
from weft.torch_private import schema_of

__all__ = ["is_expressible", "source_of"]

aten = torch.ops.aten

_TYPES = {torch.float32: "float", torch.float64: "double"}


@dataclass(frozen=True)
class _Function:
    """One of operators.h, and the names of the ATen operator's arguments that it takes, in its order."""

    name: str
    arguments: tuple[str, ...]


_FUNCTIONS: Mapping[Any, _Function] = {
    aten.add.Tensor: _Function("add", ("self", "other", "alpha")),
    aten.sub.Tensor: _Function("sub", ("self", "other", "alpha")),
    aten.mul.Tensor: _Function("mul", ("self", "other")),
    aten.div.Tensor: _Function("div", ("self", "other")),
    aten.neg.default: _Function("neg", ("self",)),
    aten.reciprocal.default: _Function("reciprocal", ("self",)),
    aten.relu.default: _Function("relu", ("self",)),
    aten.threshold_backward.default: _Function("threshold_backward", ("grad_output", "self", "threshold")),
    aten.addcmul.default: _Function("addcmul", ("self", "tensor1", "tensor2", "value")),
    aten.addcdiv.default: _Function("addcdiv", ("self", "tensor1", "tensor2", "value")),
    aten.lerp.Scalar: _Function("lerp", ("self", "end", "weight")),
}

_FRAME = """\
#include "operators.h"

using T = {type};

extern "C" void run(void** at, int64_t size, int64_t num_threads) {{
  {scalars}
  {pointers}
#pragma omp parallel for simd schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < size; ++i) {{
    {loop}
  }}
}}
"""


def is_expressible(node: fx.Node) -> bool:
    """Whether a call is element-wise on tensors of one layout and numbers, by an operator of the table."""
    if node.op != "call_function" or node.target not in _FUNCTIONS or not node.all_input_nodes:
        return False
    value = node.meta["val"]
    if value.dtype not in _TYPES or value.device.type != "cpu" or not has_known_shape(value):
        return False
    if not value.dim() or not value.numel() or not fills_memory(value):
        return False
    numbers = [arg for arg in _named_arguments(node).values() if not isinstance(arg, fx.Node)]
    others = [source.meta["val"] for source in node.all_input_nodes]
    return all(map(math.isfinite, numbers)) and all(_fits(other, value) for other in others)


def source_of(region: Region) -> str:
    """The text for a region whose operators are all expressible, the same for all its sizes.

    `at` holds what it reads, then where it writes: a place for each output.
    """
    inputs = [node for node in region.nodes.nodes if node.op == "placeholder"]
    calls = [node for node in region.nodes.nodes if node.op == "call_function"]
    scalars = [f"const T {node.name} = *static_cast<const T*>(at[{i}]);" for i, node in _numbered(inputs, is_row=False)]
    rows = [(f"p{i}", f"{node.name} = p{i}[i]") for i, node in _numbered(inputs, is_row=True)]
    places = [(f"q{i}", len(inputs) + i, node) for i, node in enumerate(region.output_nodes)]
    pointers = [f"const T* {name} = static_cast<const T*>(at[{name[1:]}]);" for name, _ in rows]
    pointers += [f"T* {name} = static_cast<T*>(at[{at}]);" for name, at, _ in places]
    loop = [f"const T {load};" for _, load in rows]
    loop += [f"const T {node.name} = {_expression(node)};" for node in calls]
    loop += [f"{name}[i] = {node.name};" for name, _, node in places]
    return _FRAME.format(
        type=_TYPES[region.outputs[0].dtype],
        scalars="\n  ".join(scalars) or "// no scalars",
        pointers="\n  ".join(pointers),
        loop="\n    ".join(loop),
    )


def _expression(node: fx.Node) -> str:
    function, given = _FUNCTIONS[node.target], _named_arguments(node)
    return f"aten::{function.name}<T>({', '.join(_operand(given[name]) for name in function.arguments)})"


def _named_arguments(node: fx.Node) -> dict[str, Any]:
    arguments = schema_of(node.target).arguments
    defaults = {item.name: item.default_value for item in arguments}
    positions = {item.name: value for item, value in zip(arguments, node.args, strict=False)}
    return {**defaults, **positions, **node.kwargs}


def _operand(value: Any) -> str:
    """A value's name, or a number: as a double, which is rounded to the type as ATen rounds a Python number."""
    return value.name if isinstance(value, fx.Node) else f"T({float(value)!r})"


def _numbered(inputs: Sequence[fx.Node], *, is_row: bool) -> list[tuple[int, fx.Node]]:
    return [(i, node) for i, node in enumerate(inputs) if bool(node.meta["val"].dim()) is is_row]


def _fits(operand: Tensor, value: Tensor) -> bool:
    return layout_of(operand) == layout_of(value) or (operand.dim() == 0 and operand.dtype == value.dtype)
