"""Partition of members into regions that can run one after the other.

Every node has a level: the number of times that a path to it leaves the members.

    a -> b -> mm -> c -> conv -> e         level 0: a, b, d
    |               |                      level 1: c, f
    +--> d          +--> f                 level 2: e          (mm and conv are no members)

Along an edge levels never fall, and from a member to what is none they rise. So there is no way out of the members of
one level and back to them: each level, and each part of it that is connected or comes first in the order, can be one
call. Operators that must keep their order (random draws, collectives) count as if each read the one before it.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from weft.graph.ir.graph import outputs_of
from weft.graph.ir.side_effects import is_pure

__all__ = ["connected", "in_chunks", "levels_of", "predecessors_of"]


def predecessors_of(nodes: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that must run before each node."""
    before: dict[fx.Node, list[fx.Node]] = {}
    last_kept: fx.Node | None = None
    for node in nodes.nodes:
        before[node] = list(node.all_input_nodes)
        if node.op == "call_function" and not is_pure(node):
            if last_kept is not None:
                before[node].append(last_kept)
            last_kept = node
    return before


def levels_of(nodes: fx.Graph, members: Collection[fx.Node]) -> dict[int, list[fx.Node]]:
    """The members of each level, in order."""
    before = predecessors_of(nodes)
    level: dict[fx.Node, int] = {}
    found: dict[int, list[fx.Node]] = {}
    for node in nodes.nodes:
        is_member = node in members
        level[node] = max((level[b] + (b in members and not is_member) for b in before[node]), default=0)
        if is_member:
            found.setdefault(level[node], []).append(node)
    return found


def connected(group: Sequence[fx.Node], loose: Collection[fx.Node] = ()) -> list[list[fx.Node]]:
    """Parts of a group that no edge connects, in the order of their first nodes.

    Args:
        loose: nodes that connect nothing, such as a learning rate that every update reads; they come first, as a part.
    """
    leader = {node: node for node in group if node not in loose}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = node = leader[leader[node]]
        return node

    for node in leader:
        for source in node.all_input_nodes:
            if source in leader:
                leader[find(node)] = find(source)
    parts: dict[fx.Node | None, list[fx.Node]] = {None: []}
    for node in group:
        parts.setdefault(find(node) if node in leader else None, []).append(node)
    return [part for part in parts.values() if part]


def in_chunks(parts: Sequence[Sequence[fx.Node]], weights: Mapping[fx.Node, int], most: int) -> Iterator[list[fx.Node]]:
    """Neighbouring parts together, up to a weight; a part that is heavier alone is cut where its order allows."""
    chunk: list[fx.Node] = []
    weight = 0
    for part in parts:
        for piece in [part] if sum(weights[n] for n in part) <= most else _pieces(part):
            more = sum(weights[node] for node in piece)
            if chunk and weight + more > most:
                yield chunk
                chunk, weight = [], 0
            chunk += piece
            weight += more
    if chunk:
        yield chunk


def _pieces(part: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Each call with the outputs that are taken from it."""
    for node in part:
        if node.target is not operator.getitem:
            yield [node, *outputs_of(node)]
