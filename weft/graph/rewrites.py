"""Exact rewrites: fewer operators, the same bits. A table of rules, each an edit of an FX graph.

    dead code               what nobody reads goes, save what draws random numbers: those behind it would draw others
    views                   a view that undoes a view, or changes nothing, gives way to what it looks at
    constants               what depends on no input is computed once
    common subexpressions   the same call on the same inputs is made once

Results stay apart: two tensors that a step returns are not made one, and none is made a constant of the graph, because
whoever gets them may write to them. A repetition in backward of something in forward is left alone unless it is a
view: it may be there to save memory (checkpointing).
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.graph import Graph, is_random
from weft.graph.roles import is_collective
from weft.graph.validity import check_pass
from weft.torch_private import schema_of

__all__ = ["EXACT", "Rule", "remove_dead", "rewrite"]

aten = torch.ops.aten

_LARGEST_CONSTANT = 1 << 20  # bytes
_SHAPE_ONLY = (aten.ones_like.default, aten.zeros_like.default, aten.full_like.default)
_UNDEFINED = ("aten.empty", "aten.new_empty")  # beginnings of the names of operators that leave memory as it is


@dataclass(frozen=True)
class Rule:
    """An edit in place of nodes and constants; returns how many nodes it took out."""

    name: str
    edit: Callable[[fx.Graph, dict[str, Tensor]], int]


def rewrite(graph: Graph, rules: Sequence[Rule] | None = None) -> Graph:
    """The graph after all rules (by default the exact ones), again and again until none finds anything."""
    rules = EXACT if rules is None else rules
    edited = graph.edited()
    constants = dict(graph.constants)
    while sum(rule.edit(edited.nodes, constants) for rule in rules):
        pass
    used = {str(node.target) for node in edited.nodes.nodes if node.op == "get_attr"}
    after = replace(edited, constants={name: value for name, value in constants.items() if name in used})
    check_pass(graph, after)
    return after


def remove_dead(nodes: fx.Graph, _constants: dict[str, Tensor] | None = None) -> int:
    """Erase what nobody reads, save what draws random numbers or talks to other ranks."""
    count = 0
    for node in reversed(list(nodes.nodes)):
        is_free = node.op in ("call_function", "get_attr") and not is_random(node) and not is_collective(node)
        if is_free and not node.users:
            nodes.erase_node(node)
            count += 1
    return count


def remove_idle_views(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """t(t(x)), a view of x in x's own shape, and an expansion to it, are x."""
    count = 0
    for node in list(nodes.nodes):
        source = _seen_through(node)
        if source is not None and _layout(source) == _layout(node):
            node.replace_all_uses_with(source)
            nodes.erase_node(node)
            count += 1
    return count


def fold_constants(nodes: fx.Graph, constants: dict[str, Tensor]) -> int:
    """Compute now what depends on constants, or on the shape of its input, alone."""
    count, escaping = 0, _escaping(nodes)
    for node in list(nodes.nodes):
        if node in escaping or not _is_foldable(node):
            continue
        value = _value_now(node, constants)
        name = _new_name(constants)
        constants[name] = value
        with nodes.inserting_before(node):
            constant = nodes.get_attr(name)
        constant.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(constant)
        nodes.erase_node(node)
        count += 1
    return count


def merge_repeated(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Let the first of several equal calls stand for all."""
    count, escaping = 0, _escaping(nodes)
    first: dict[Hashable, fx.Node] = {}
    for node in list(nodes.nodes):
        if node.op not in ("call_function", "get_attr") or is_random(node) or is_collective(node):
            continue
        other = first.setdefault(_key(node), node)
        if other is not node and node not in escaping:
            node.replace_all_uses_with(other)
            nodes.erase_node(node)
            count += 1
    return count


EXACT: tuple[Rule, ...] = (
    Rule("dead code", remove_dead),
    Rule("views", remove_idle_views),
    Rule("constants", fold_constants),
    Rule("common subexpressions", merge_repeated),
)


def _seen_through(node: fx.Node) -> fx.Node | None:
    """What a view that may be idle looks at."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is not None and node.target is aten.t.default and source.target is aten.t.default:
        assert isinstance(source.args[0], fx.Node)
        return source.args[0]
    return source if node.target in (aten.view.default, aten.expand.default, aten.alias.default) else None


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.dtype


def _is_foldable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or is_random(node) or is_collective(node):
        return False
    if str(node.target).startswith(_UNDEFINED) or value.numel() * value.element_size() > _LARGEST_CONSTANT:
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


def _is_view(node: fx.Node) -> bool:
    """Whether the call gives another look at its input's memory."""
    schema = schema_of(node.target)
    return schema is not None and any(item.alias_info is not None for item in schema.returns)


def _escaping(nodes: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory the caller gets to hold: the results, and what they are views of."""
    waiting = list(nodes.output_node().all_input_nodes)
    found = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.target is operator.getitem or _is_view(node):
            for source in node.all_input_nodes:
                if source not in found:
                    found.add(source)
                    waiting.append(source)
    return found


def _key(node: fx.Node) -> Hashable:
    is_cheap = _is_view(node) or node.target is operator.getitem
    part = () if is_cheap else (node.meta.get("is_backward", False), node.meta.get("in_grad_mode", False))
    return node.op, node.target, _frozen(node.args), _frozen(node.kwargs), part


def _frozen(value: Any) -> Hashable:
    """A key that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))
