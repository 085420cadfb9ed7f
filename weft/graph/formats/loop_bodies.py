"""The bodies of loops, by a hash of what they compute: a graph names them, and so does a saved one."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from safetensors.torch import save
from torch import fx

from weft.errors import GraphError
from weft.graph.formats.json_document import graph_to_json
from weft.graph.ir.graph import Graph

__all__ = ["OPERATORS", "bodies_in", "body_of", "find_body", "hash_of_body", "register_body"]

OPERATORS = frozenset({"weft.loop.default", "weft.loop_kept.default", "weft.loop_backward.default"})
"""Operators whose first argument is the hash of a body."""

_BODIES: dict[str, Graph] = {}


def register_body(key: str, body: Graph) -> None:
    """Keep a body for good: a graph may name it at any time. Each is a few nodes."""
    _BODIES.setdefault(key, body)


def hash_of_body(body: Graph) -> str:
    """Sixteen hexadecimal digits that say what a body computes, its constants' values among it."""
    text = json.dumps(graph_to_json(body), sort_keys=True)
    values = save({name: tensor.detach().contiguous() for name, tensor in body.constants.items()})
    return hashlib.sha256(text.encode() + values).hexdigest()[:16]


def find_body(key: str) -> Graph:
    if key not in _BODIES:
        raise GraphError(f"body of a loop is not known in this process ({key}); save and load the graph that calls it")
    return _BODIES[key]


def body_of(node: fx.Node) -> str:
    """The hash of the body that a node loops over; empty for other nodes."""
    key: Any = node.args[0] if str(node.target) in OPERATORS else ""
    return str(key)


def bodies_in(graph: Graph) -> Iterator[str]:
    """The bodies that a graph needs, those of loops inside loops first."""
    seen: dict[str, None] = {}

    def visit(nodes: fx.Graph) -> None:
        for node in nodes.nodes:
            key = body_of(node)
            if key and key not in seen:
                visit(find_body(key).nodes)
                seen[key] = None

    visit(graph.nodes)
    yield from seen
