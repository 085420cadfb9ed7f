"""Dead code."""

from torch import Tensor, fx

from weft.graph.rewrites.memory import is_free_to_go
from weft.graph.rewrites.rule import Rule

__all__ = ["DEAD", "remove_dead"]


def remove_dead(nodes: fx.Graph, _constants: dict[str, Tensor] | None = None) -> int:
    """Erase what nobody reads, save what draws random numbers (those behind it would draw others) or talks to ranks."""
    count = 0
    for node in reversed(list(nodes.nodes)):
        if node.op in ("call_function", "get_attr") and is_free_to_go(node) and not node.users:
            nodes.erase_node(node)
            count += 1
    return count


DEAD = Rule("dead code", remove_dead)
