"""Straight-line Python from a graph: one line an operator, values freed after their last use.

Results under one part of the outputs, such as the gradients, need not be returned: each is handed to a sink as soon as
it is made, while the rest still has to run. It then belongs to the sink, so it is copied where anything else holds it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from weft.graph.graph import Graph, name_of
from weft.graph.literals import literal
from weft.graph.structure import paths_of

__all__ = ["source_of"]

# The forward of mkldnn's LSTM keeps a workspace for its backward in grad mode only, and computes otherwise without.
_MINDS_GRAD_MODE = ("aten.mkldnn_rnn_layer.default",)

_HEADER = '''"""A training step, generated from its graph: for reading and for stepping through with a debugger."""

import torch
'''


def source_of(graph: Graph, sunk: str = "") -> str:
    """The text of a module with a function `step(inputs, sink)`: values of the placeholders in, list of results out.

    The module is to be given `own(tensor)`, which copies what others hold, `copy(tensor)`, `below_autograd(operator)`
    and the graph's constants.

    Args:
        sunk: a part of the outputs; its results are handed to `sink(path, tensor)`, and None is returned for them.
    """
    used = sorted({_alias(node) for node in graph.nodes.nodes if _is_operator(node)})
    lines = [f"{alias} = {bound}" for alias, bound in used]
    lines += ["", "", "def step(inputs, sink):", *(f"    {line}" for line in _body(graph, _sinking(graph, sunk)))]
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


def _body(graph: Graph, sinking: _Sinking) -> Iterator[str]:
    dying = _last_uses(graph, sinking)
    roles = {made.node: made.role for made in graph.operators}
    part = ""
    yield f"[{', '.join(node.name for node in graph.placeholders)}] = inputs"
    for node in graph.nodes.nodes:
        if node.op == "call_function":
            if roles.get(node, part) != part:
                part = roles[node]
                yield f"# {part}"
            yield _call(node)
        if node in dying:
            yield f"del {', '.join(dead.name for dead in dying[node])}"
        yield from _hand_over(node, sinking)
    yield f"return [{', '.join(map(literal, sinking.returned))}]"


def _hand_over(node: fx.Node, sinking: _Sinking) -> Iterator[str]:
    paths = sinking.paths.get(node, [])
    for i, path in enumerate(paths):
        is_last = i == len(paths) - 1 and node in sinking.given
        yield f"sink({path!r}, {'own' if is_last else 'copy'}({node.name}))"
    if node in sinking.given:
        yield f"del {node.name}"


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


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        source, index = node.args
        return f"{node.name} = {literal(source)}[{index}]"
    arguments = [literal(value) for value in node.args] + [f"{k}={literal(v)}" for k, v in node.kwargs.items()]
    where = f"  # {node.meta['line']}" if node.meta.get("line") else ""
    return f"{node.name} = {_alias(node)[0]}({', '.join(arguments)}){where}"


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _alias(node: fx.Node) -> tuple[str, str]:
    """`("aten_mm", "torch.ops.aten.mm.default")`."""
    dotted = str(node.target)
    alias = name_of(node.target).replace(".", "_")
    if dotted in _MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
        return f"{alias}_for_backward", f"below_autograd(torch.ops.{dotted})"
    return alias, f"torch.ops.{dotted}"
