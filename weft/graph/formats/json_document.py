"""Graphs as JSON and back, without the values of their constants."""

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, fx

from weft.errors import CorruptFileError, GraphError
from weft.graph.formats.json_values import (
    decode,
    decode_condition,
    decode_tree,
    decode_value,
    encode,
    encode_condition,
    encode_value,
)
from weft.graph.ir.graph import Graph
from weft.graph.ir.symbolic_sizes import SMALLEST, Size
from weft.graph.ir.verification import check_graph
from weft.torch_private import fake_mode, hint_of, settle_sizes, symbolic_mode

__all__ = ["GRAPH_KEYS", "check_keys", "graph_from_json", "graph_to_json"]

GRAPH_KEYS = {"arguments", "results", "sizes", "conditions", "nodes"}
_NODE_KEYS = {"name", "kind", "target", "args", "kwargs", "value", "is_backward", "in_grad_mode", "line"}
_KINDS = ("placeholder", "get_attr", "call_function", "output")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

FindOperator = Callable[[str], Any]
"""From the name of an operator to the operator; raises GraphError for one that a graph may not call."""


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """A graph as JSON.

    Raises:
        GraphError: an operator is called with what has no place in JSON.
    """
    return {
        "arguments": encode(graph.arguments),
        "results": encode(graph.results),
        "sizes": {name: _example(graph, *place) for name, place in graph.sizes.items()},
        "conditions": [encode_condition(condition) for condition in graph.conditions],
        "nodes": [_node_to_json(node) for node in graph.nodes.nodes],
    }


def graph_from_json(
    document: Mapping[str, Any], constants: Mapping[str, Tensor], find: FindOperator, folder: Path
) -> Graph:
    """The graph again, checked; `folder` is where it was read, for errors."""
    nodes = fx.Graph()
    mode, sizes = _mode_for(document["sizes"])
    known: dict[str, fx.Node] = {}
    for item in document["nodes"]:
        check_keys(item, _NODE_KEYS, folder)
        name, kind = item["name"], item["kind"]
        if not _IDENTIFIER.fullmatch(name) or name in known:
            raise CorruptFileError(f"not the name of a node, or one for the second time ({folder}: {name!r})")
        if kind not in _KINDS:
            raise GraphError(f"saved graph has a node of an unknown kind ({folder}: {kind!r})")
        target = _find_target(item["target"], find) if kind == "call_function" else str(item["target"])
        args, kwargs = decode(item["args"], known), decode(item["kwargs"], known)
        node = nodes.create_node(kind, target, args, kwargs, name=name)
        node.meta = {key: item[key] for key in ("is_backward", "in_grad_mode", "line")}
        if kind != "output":
            node.meta["val"] = decode_value(item["value"], mode, sizes)
        known[name] = node
    if sizes:
        settle_sizes(mode)
    arguments, results = decode_tree(document["arguments"]), decode_tree(document["results"])
    graph = Graph(nodes, arguments, results, constants, tuple(map(decode_condition, document["conditions"])))
    check_graph(graph)
    return graph


def check_keys(item: Any, wanted: set[str], folder: Path) -> None:
    """Raise CorruptFileError unless this is an object with exactly these keys."""
    if not isinstance(item, dict) or set(item) != wanted:
        found = sorted(set(item) ^ wanted) if isinstance(item, dict) else item
        raise CorruptFileError(f"saved graph lacks or has unknown keys ({folder}: {found})")


def _node_to_json(node: fx.Node) -> dict[str, Any]:
    is_item = node.target is operator.getitem
    return {
        "name": node.name,
        "kind": node.op,
        "target": "getitem" if is_item else str(node.target),
        "args": encode(node.args),
        "kwargs": encode(dict(node.kwargs)),
        "value": encode_value(node.meta.get("val")),
        "is_backward": bool(node.meta.get("is_backward", False)),
        "in_grad_mode": bool(node.meta.get("in_grad_mode", False)),
        "line": str(node.meta.get("line", "")),
    }


def _find_target(dotted: str, find: FindOperator) -> Any:
    return operator.getitem if dotted == "getitem" else find(dotted)


def _example(graph: Graph, place: int, dim: int) -> int:
    return hint_of(graph.placeholders[place].meta["val"].shape[dim])


def _mode_for(examples: Mapping[str, int]) -> tuple[Any, Mapping[str, Any]]:
    """The mode that makes tensors without values, and the symbol of each named size."""
    if not examples:
        return fake_mode(), {}
    for name, example in examples.items():
        Size("name", (name,))  # refuses what cannot be one
        if type(example) is not int or example < SMALLEST:
            raise CorruptFileError(f"saved graph has a size that cannot be ({name}: {example!r})")
    return symbolic_mode(examples, str)
