"""Chains: trees of calls of one kind, sums or products, taken apart and written again where that is cheaper.

A chain ends where another node reads along: what is read twice is computed once, whatever the chain becomes. All of it
is of one floating type and of one part of the step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from weft.graph.ir.memory_layout import layout_of
from weft.graph.rewrites.pattern import Call, Found
from weft.graph.rewrites.price import price_of_node
from weft.graph.rewrites.rule import NewCall, instantiate, replace_with
from weft.torch_private import size_hints

__all__ = ["Chain", "Parts", "Writer", "num_elements", "rewrite_chains"]

Parts = Callable[[fx.Node], "list[tuple[Any, float]] | None"]
"""The operands of a call, each a node or a number, and their weights in it; None for what is no link of the chain."""


@dataclass(frozen=True)
class Chain:
    """The calls, root first, and the leaves with their weights: products of the weights on the way to them."""

    members: tuple[fx.Node, ...]
    leaves: tuple[tuple[Any, float], ...]


Writer = Callable[[Chain], Iterator[tuple[Call, Found]]]
"""Ways to write a chain, each with what its names stand for."""


def rewrite_chains(nodes: fx.Graph, parts: Parts, write: Writer) -> int:
    """Write every chain in the cheapest of the ways, if that is cheaper than it was."""
    count = 0
    seen: set[fx.Node] = set()
    for root in reversed(list(nodes.nodes)):
        if root in seen or not root.users or not _is_link(root, parts):
            continue
        chain = _collect(root, parts)
        seen.update(chain.members)
        new = _cheapest(chain, write) if len(chain.members) > 1 else None
        if new is not None:
            replace_with(nodes, root, new)
            for member in chain.members:
                nodes.erase_node(member)
            count += 1
    return count


def num_elements(node: fx.Node) -> int:
    """Number of elements; of a symbolic shape, that which was captured."""
    return size_hints(node.meta["val"]).numel()


def _collect(root: fx.Node, parts: Parts) -> Chain:
    members: list[fx.Node] = []
    leaves: list[tuple[Any, float]] = []
    waiting: list[tuple[Any, float]] = [(root, 1.0)]
    while waiting:
        value, weight = waiting.pop()
        if value is root or _may_open(value, root, parts):
            members.append(value)
            waiting += [(part, weight * by) for part, by in reversed(parts(value) or [])]
        else:
            leaves.append((value, weight))
    return Chain(tuple(members), tuple(leaves))


def _may_open(value: Any, root: fx.Node, parts: Parts) -> bool:
    if not isinstance(value, fx.Node) or not _is_link(value, parts) or len(value.users) != 1:
        return False
    is_same_part = value.meta.get("is_backward", False) == root.meta.get("is_backward", False)
    is_used_once = sum(item is value for item in next(iter(value.users)).args) == 1
    return is_same_part and is_used_once and value.meta["val"].dtype == root.meta["val"].dtype


def _is_link(node: fx.Node, parts: Parts) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    found = parts(node)
    return found is not None and all(_is_operand(item, value) for item, _ in found)


def _is_operand(item: Any, value: Tensor) -> bool:
    if isinstance(item, fx.Node):
        other = item.meta.get("val")
        return isinstance(other, Tensor) and other.dtype == value.dtype and other.device == value.device
    return isinstance(item, (int, float)) and not isinstance(item, bool)


def _cheapest(chain: Chain, write: Writer) -> NewCall | None:
    root, best = chain.members[0], None
    lowest = sum(map(price_of_node, chain.members))
    for template, names in write(chain):
        new = instantiate(template, names, root)
        if new is not None and new.price < lowest and layout_of(new.value) == layout_of(root.meta["val"]):
            best, lowest = new, new.price
    return best
