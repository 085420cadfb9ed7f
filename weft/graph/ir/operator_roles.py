"""The part of a step that each node belongs to: forward, backward, update or communication.

Backward are the calls that autograd made while it ran. Of the rest, what a backward needs is forward, even where it is
computed from a gradient (a gradient penalty); what follows from a gradient, or only feeds the new state, is update.
"""

from collections.abc import Iterable
from typing import Literal

from torch import fx

from weft.graph.ir.side_effects import is_collective

__all__ = ["roles_of"]

CallRole = Literal["forward", "backward", "update", "communication"]


def roles_of(graph: fx.Graph, outputs: set[fx.Node]) -> dict[fx.Node, CallRole]:
    """The role of every call; `outputs` are the nodes whose values the step returns beside its new state."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    backward = {node for node in calls if node.meta.get("is_backward", False)}
    needed = _above(backward)
    after = _below(backward, calls)
    shown = _above(outputs) | outputs
    roles: dict[fx.Node, CallRole] = {}
    for node in calls:
        if is_collective(node):
            roles[node] = "communication"
        elif node in backward:
            roles[node] = "backward"
        elif node in needed or (node in shown and node not in after):
            roles[node] = "forward"
        else:
            roles[node] = "update"
    return roles


def _above(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that these nodes are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _below(nodes: set[fx.Node], calls: list[fx.Node]) -> set[fx.Node]:
    """The nodes of an ordered list that are computed from these nodes."""
    found: set[fx.Node] = set()
    for node in calls:
        if any(source in nodes or source in found for source in node.all_input_nodes):
            found.add(node)
    return found
