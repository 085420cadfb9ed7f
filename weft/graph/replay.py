"""Running a graph node by node, for tracing or comparing it: slow, and with no thought for memory."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from weft.graph.sizes import places_of, resolved

__all__ = ["replay"]


def _call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return node.target(*args, **kwargs)  # type: ignore[operator]


def replay(
    graph: fx.Graph,
    inputs: Sequence[Any],
    constants: Callable[[str], Any],
    *,
    before: Callable[[fx.Node], None] = lambda _node: None,
    after: Callable[[fx.Node, Any], Any] = lambda _node, value: value,
    call: Callable[[fx.Node, Sequence[Any], dict[str, Any]], Any] = _call,
) -> dict[fx.Node, Any]:
    """The value of every node; that of the output node is what it returns.

    Args:
        constants: gives the value of a get_attr node.
        before: told of each node before it runs.
        after: gives what stands for a node's value from then on.
        call: computes an operator.
    """
    values: dict[fx.Node, Any] = {}
    likes = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    sizes = {name: inputs[place].shape[dim] for name, (place, dim) in places_of(likes).items()}
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
            args, kwargs = resolved((args, kwargs), sizes) if sizes else (args, kwargs)
            is_part = node.target is operator.getitem
            values[node] = args[0][args[1]] if is_part else call(node, args, kwargs)
        values[node] = after(node, values[node])
    return values
