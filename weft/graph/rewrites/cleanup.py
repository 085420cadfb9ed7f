"""Clean-up of a graph: dead code, constant folding, common subexpressions."""

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.ir.memory_layout import escaping, has_known_shape, is_view
from weft.graph.ir.side_effects import is_pure, remove_dead
from weft.graph.ir.symbolic_sizes import sizes_in
from weft.graph.rewrites.rule import Rule

__all__ = ["CONSTANTS", "DEAD", "REPEATED"]

aten = torch.ops.aten

DEAD = Rule("dead code", remove_dead)

_LARGEST = 1 << 20  # bytes
_SHAPE_ONLY = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default)
_UNDEFINED = ("aten.empty", "aten.new_empty")  # beginnings of the names of operators that leave memory as it is


def fold_constants(nodes: fx.Graph, constants: dict[str, Tensor]) -> int:
    """Compute now what depends on constants, or on the shape of its input, alone.

    A result of the step is left alone: whoever gets it may write to it, and would write to the constant.
    """
    count, leaving = 0, escaping(nodes)
    for node in list(nodes.nodes):
        if node in leaving or not _is_foldable(node):
            continue
        name = _new_name(constants)
        constants[name] = _value_now(node, constants)
        with nodes.inserting_before(node):
            constant = nodes.get_attr(name)
        constant.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(constant)
        nodes.erase_node(node)
        count += 1
    return count


CONSTANTS = Rule("constants", fold_constants)


def _is_foldable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or not is_pure(node):
        return False
    if not has_known_shape(value) or any(sizes_in((node.args, node.kwargs))):
        return False
    if str(node.target).startswith(_UNDEFINED) or value.numel() * value.element_size() > _LARGEST:
        return False
    return node.target in _SHAPE_ONLY or all(source.op == "get_attr" for source in node.all_input_nodes)


def _value_now(node: fx.Node, constants: dict[str, Tensor]) -> Tensor:
    def value_of(source: fx.Node) -> Tensor:
        if source.op == "get_attr":
            return constants[str(source.target)]
        like = source.meta["val"]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    with torch.no_grad():
        value: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return value


def _new_name(constants: dict[str, Tensor]) -> str:
    number = len(constants)
    while f"constant_{number}" in constants:
        number += 1
    return f"constant_{number}"


def merge_repeated(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Let the first of several equal calls stand for all.

    Results stay apart: whoever gets two tensors may write to one. A repetition in backward of something in forward is
    left alone unless it is a view: it may be there to save memory (checkpointing).
    """
    count, leaving = 0, escaping(nodes)
    first: dict[Hashable, fx.Node] = {}
    for node in list(nodes.nodes):
        if node.op not in ("call_function", "get_attr") or not is_pure(node):
            continue
        other = first.setdefault(_key(node), node)
        if other is not node and node not in leaving:
            node.replace_all_uses_with(other)
            nodes.erase_node(node)
            count += 1
    return count


REPEATED = Rule("common subexpressions", merge_repeated)


def _key(node: fx.Node) -> Hashable:
    is_cheap = is_view(node) or node.target is operator.getitem
    part = () if is_cheap else (node.meta.get("is_backward", False), node.meta.get("in_grad_mode", False))
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs), part


def _frozen(value: Any) -> Hashable:
    """A key that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))
