"""Common subexpressions."""

import operator
from collections.abc import Hashable
from typing import Any

from torch import Tensor, fx

from weft.graph.rewrites.memory import escaping, is_free_to_go, is_view
from weft.graph.rewrites.rule import Rule

__all__ = ["REPEATED"]


def merge_repeated(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Let the first of several equal calls stand for all.

    Results stay apart: whoever gets two tensors may write to one. A repetition in backward of something in forward is
    left alone unless it is a view: it may be there to save memory (checkpointing).
    """
    count, leaving = 0, escaping(nodes)
    first: dict[Hashable, fx.Node] = {}
    for node in list(nodes.nodes):
        if node.op not in ("call_function", "get_attr") or not is_free_to_go(node):
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
