"""A graph run node by node, for tracing or comparing it; and the calls and last reads that other programs share."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from weft.graph.ir.symbolic_sizes import places_of, resolved
from weft.torch_private import below_autograd, call_for_any_size

__all__ = ["MINDS_GRAD_MODE", "call_of", "call_plainly", "last_reads", "replay", "runner_of"]

MINDS_GRAD_MODE = ("aten.mkldnn_rnn_layer.default",)
"""Operators that keep what their backward needs in grad mode only, as the forward of mkldnn's LSTM its workspace."""


def call_of(node: fx.Node) -> Callable[..., Any]:
    """The function that computes a node as eager mode would have it computed."""
    assert callable(node.target)
    if str(node.target) in MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
        return below_autograd(node.target)
    return node.target


def call_plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def runner_of(mode: Any) -> Callable[..., Any]:
    """The function that calls an operator on the tensors of a fake mode: `run(operator, *args, **kwargs)`."""
    return call_plainly if mode.shape_env is None else call_for_any_size


def last_reads(nodes: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The values that are done with after each node; what a graph returns is done with after its output node."""
    seen: set[fx.Node] = set()
    done: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(nodes.nodes)):
        for value in dict.fromkeys((node, *node.all_input_nodes)):
            if value not in seen:
                seen.add(value)
                done.setdefault(node, []).append(value)
    return done


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
    """Run a graph, and return the value of every node; that of the output node is what the graph returns.

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
