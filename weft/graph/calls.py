"""How one operator of a graph is called, and when its values are last read."""

from collections.abc import Callable
from typing import Any

from torch import fx

from weft.torch_private import below_autograd

__all__ = ["MINDS_GRAD_MODE", "call_of", "last_reads"]

MINDS_GRAD_MODE = ("aten.mkldnn_rnn_layer.default",)
"""Operators that keep what their backward needs in grad mode only, as the forward of mkldnn's LSTM its workspace."""


def call_of(node: fx.Node) -> Callable[..., Any]:
    """The function that computes a node as eager mode would have it computed."""
    assert callable(node.target)
    if str(node.target) in MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
        return below_autograd(node.target)
    return node.target


def last_reads(nodes: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Which values are done with after which node; what a graph returns is done with after its output node."""
    seen: set[fx.Node] = set()
    done: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(list(nodes.nodes)):
        for value in dict.fromkeys((node, *node.all_input_nodes)):
            if value not in seen:
                seen.add(value)
                done.setdefault(node, []).append(value)
    return done
