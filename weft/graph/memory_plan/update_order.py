"""The order of calls: as captured, but for updates, each of which comes as soon as its gradient is there.

    captured   ... backward 3, backward 2, backward 1, update 1, update 2, update 3
    planned    ... backward 3, update 3, backward 2, update 2, backward 1, update 1

A gradient is still in the cache when its parameter is updated, and its memory is free afterwards. An update waits for
those who still have to read the old value, so that the new one can take its place; and what only an update reads, such
as a velocity that is scaled, waits for it.
"""

from collections.abc import Collection

from torch import fx

from weft.graph.ir.graph import Graph
from weft.graph.ir.side_effects import is_pure
from weft.graph.memory_plan.aliasing import owners_of

__all__ = ["early_updates"]


def early_updates(graph: Graph, replaced: Collection[fx.Node], guard: fx.Node | None = None) -> list[fx.Node]:
    """All nodes but the output, in the order in which they are to run.

    Args:
        replaced: inputs whose memory the step may write over.
        guard: a node after which all updates come.
    """
    nodes = [node for node in graph.nodes.nodes if node.op != "output"]
    updates = _updates(graph, nodes)
    turns = _turns(nodes, updates, replaced, guard)
    following: dict[int, list[fx.Node]] = {}
    for node in updates:
        following.setdefault(turns[node], []).append(node)
    order: list[fx.Node] = []
    for number, node in enumerate(nodes):
        if node not in turns:
            order.append(node)
        order += following.get(number, ())
    return order


def _updates(graph: Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """The calls that may be moved: they are of the update, and nothing but the update reads them."""
    roles = {made.node: made.role for made in graph.operators}
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        maker = node if node in roles else next(iter(node.all_input_nodes), node)  # of one output of several
        is_update = roles.get(maker) == "update" and is_pure(node)
        if is_update and all(user in found or user.op == "output" for user in node.users):
            found.add(node)
    return [node for node in nodes if node in found]


def _turns(
    nodes: list[fx.Node], updates: list[fx.Node], replaced: Collection[fx.Node], guard: fx.Node | None
) -> dict[fx.Node, int]:
    """The number of the call, not an update itself, that each update follows."""
    numbers = {node: number for number, node in enumerate(nodes)}
    moved, owners = set(updates), owners_of(nodes)
    last_reader: dict[fx.Node, int] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            for owner in owners[source]:
                if owner in replaced and node not in moved:
                    last_reader[owner] = numbers[node]
    soonest: dict[fx.Node, int] = {}
    start = numbers[guard] if guard is not None and guard not in moved else 0
    for node in updates:
        needed = [soonest[source] if source in moved else numbers[source] for source in node.all_input_nodes]
        needed += [last_reader.get(owner, 0) for source in node.all_input_nodes for owner in owners[source]]
        soonest[node] = max(start, *needed) if needed else start
    turns: dict[fx.Node, int] = {}
    for node in reversed(updates):
        turns[node] = max(soonest[node], min((turns[user] for user in node.users if user in moved), default=0))
    return turns
