"""Running a graph node by node, for tracing it again: slow, and with no thought for memory."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

__all__ = ["replay"]


def replay(
    graph: fx.Graph,
    inputs: Sequence[Any],
    constants: Callable[[str], Any],
    *,
    before: Callable[[fx.Node], None] = lambda _node: None,
    after: Callable[[fx.Node, Any], Any] = lambda _node, value: value,
) -> dict[fx.Node, Any]:
    """The value of every node; that of the output node is what it returns.

    Args:
        constants: gives the value of a get_attr node.
        before: told of each node before it runs.
        after: gives what stands for a node's value from then on.
    """
    values: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        before(node)
        if node.op == "placeholder":
            values[node] = next(remaining)
        elif node.op == "get_attr":
            values[node] = constants(str(node.target))
        elif node.op == "output":
            values[node] = fx.node.map_arg(node.args[0], values.__getitem__)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        values[node] = after(node, values[node])
    return values
