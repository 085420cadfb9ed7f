"""Straight-line Python from a graph: one line an operator, values freed after their last use.

Results under one part of the outputs, such as the gradients, need not be returned: each is handed to a sink as soon as
it is made, while the rest still has to run. It then belongs to the sink, so it is copied where anything else holds it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from weft.errors import GraphError
from weft.graph.fusion import region_of
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import MINDS_GRAD_MODE
from weft.graph.ir.pytree import paths_of
from weft.graph.ir.source_text import argument_text, literal, name_of, variable_names

__all__ = ["source_of"]

_RESERVED = {"below_autograd", "compiled", "constants", "copy", "inputs", "own", "sink", "step", "torch"}

_HEADER = '''"""A training step, generated from its graph: for reading and for stepping through with a debugger."""

import torch
'''


def source_of(graph: Graph, sunk: str = "") -> str:
    """The text of a module with a function `step(inputs, sink)`: values of the placeholders in, list of results out.

    The module is to be given `own(tensor)`, which copies what others hold, `copy(tensor)`, `below_autograd(operator)`,
    `compiled(region)` by name, and `constants` by name.

    Args:
        sunk: a part of the outputs; its results are handed to `sink(path, tensor)`, and None is returned for them.
    """
    used = sorted({_alias(node) for node in graph.nodes.nodes if _is_operator(node)})
    taken = _RESERVED | {alias for alias, _ in used}
    if clash := taken & graph.sizes.keys():
        raise GraphError(
            f"a size has a name that generated code needs ({', '.join(clash)}); give it another in dynamic"
        )
    writer = _Writer(graph, _sinking(graph, sunk), variable_names(graph.nodes.nodes, taken | graph.sizes.keys()))
    lines = [f"{alias} = {bound}" for alias, bound in used]
    lines += ["", "", "def step(inputs, sink):", *(f"    {line}" for line in writer.body())]
    return "\n".join([_HEADER, *lines, ""])


@dataclass(frozen=True)
class _Sinking:
    """What goes where: `paths` to the sink, `returned` to the caller; what is `given` away is needed by no one else."""

    paths: dict[fx.Node, list[str]]
    returned: list[fx.Node | None]
    given: set[fx.Node]


def _sinking(graph: Graph, sunk: str) -> _Sinking:
    prefix, nodes = f"outputs.{sunk}.", graph.result_nodes
    paths: dict[fx.Node, list[str]] = {}
    returned: list[fx.Node | None] = [None] * len(nodes)
    for path, place in paths_of(graph.results):
        if sunk and path.startswith(prefix):
            paths.setdefault(nodes[place], []).append(path.removeprefix(prefix))
        else:
            returned[place] = nodes[place]
    is_free = {node: node.op == "call_function" and all(user.op == "output" for user in node.users) for node in paths}
    return _Sinking(paths, returned, {node for node in paths if is_free[node] and node not in returned})


class _Writer:
    """Writes the lines of one step."""

    def __init__(self, graph: Graph, sinking: _Sinking, names: dict[fx.Node, str]) -> None:
        self._graph = graph
        self._sinking = sinking
        self._names = names

    def body(self) -> Iterator[str]:
        dying = _last_uses(self._graph, self._sinking)
        roles = {made.node: made.role for made in self._graph.operators}
        part = ""
        placeholders = self._graph.placeholders
        yield f"[{', '.join(map(self._literal, placeholders))}] = inputs"
        for name, (place, dim) in self._graph.sizes.items():
            yield f"{name} = {self._literal(placeholders[place])}.shape[{dim}]"
        for node in self._graph.nodes.nodes:
            if node.op == "get_attr":
                yield f"{self._literal(node)} = constants[{node.target!r}]"
            elif node.op == "call_function":
                if roles.get(node, part) != part:
                    part = roles[node]
                    yield f"# {part}"
                yield self._call(node)
            if node in dying:
                yield f"del {', '.join(map(self._literal, dying[node]))}"
            yield from self._hand_over(node)
        yield f"return [{', '.join(map(self._literal, self._sinking.returned))}]"

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._literal(node)} = {self._literal(source)}[{index}]"
        arguments = argument_text(node.args, node.kwargs, self._names.__getitem__)
        line = "".join(filter(str.isprintable, node.meta.get("line", "")))  # a comment must not end early
        where = f"  # {line}" if line else ""
        return f"{self._literal(node)} = {_alias(node)[0]}({arguments}){where}"

    def _hand_over(self, node: fx.Node) -> Iterator[str]:
        paths = self._sinking.paths.get(node, [])
        is_given = node in self._sinking.given
        for i, path in enumerate(paths):
            is_last = i == len(paths) - 1 and is_given
            yield f"sink({path!r}, {'own' if is_last else 'copy'}({self._literal(node)}))"
        if is_given:
            yield f"del {self._literal(node)}"

    def _literal(self, value: Any) -> str:
        return literal(value, self._names.__getitem__)


def _last_uses(graph: Graph, sinking: _Sinking) -> dict[fx.Node, list[fx.Node]]:
    """Which values die with which call. Inputs and constants are not ours to free, results live on."""
    alive = {node for node in sinking.returned if node is not None} | sinking.given
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed([node for node in graph.nodes.nodes if node.op == "call_function"]):
        for value in (node, *node.all_input_nodes):
            if value.op == "call_function" and value not in alive:
                alive.add(value)
                dying.setdefault(node, []).append(value)
    return dying


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _alias(node: fx.Node) -> tuple[str, str]:
    """`("aten_mm", "torch.ops.aten.mm.default")`."""
    dotted = str(node.target)
    alias = name_of(node.target).replace(".", "_")
    if dotted in MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
        return f"{alias}_for_backward", f"below_autograd(torch.ops.{dotted})"
    region = region_of(node.target)
    if region is not None:
        return f"region_{region.name}", f"compiled({region.name!r})"
    return alias, f"torch.ops.{dotted}"
