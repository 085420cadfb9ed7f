"""Graphs from graphs: gradients added, outputs added, values replaced, state updated.

Each traces the graph again, with autograd watching: the operators of a graph are PyTorch's, and so are their
derivatives, those of backward operators too. A gradient of a gradient is therefore nothing special.

Variables go by name (`mm_1`) or by path: `outputs.loss`, `state.weight` (the old one), `batch.x`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError, nearest
from weft.graph.capture.capture import capture_noting
from weft.graph.capture.dynamic_sizes import example_of, names_of
from weft.graph.capture.recorder import lifted
from weft.graph.capture.tracing import Origin
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import replay
from weft.graph.ir.pytree import flatten_as, paths_of, relabel, unflatten
from weft.graph.ir.side_effects import remove_dead
from weft.graph.ir.verification import check_graph

__all__ = ["extend", "grad", "replace_gradient", "update_state"]

Addition = Callable[["Values"], Mapping[str, Any]]


def grad(graph: Graph, loss: str, wrt: Sequence[str]) -> Graph:
    """Add the gradients of a scalar as outputs: `outputs.gradients.<name as given>`.

    Args:
        loss: a scalar variable, by name or path: `outputs.loss`.
        wrt: variables by name or path, such as `state.weight`.

    Raises:
        GraphError: the loss is no scalar, does not depend on one of `wrt`, or an operator has no derivative.
    """

    def gradients(values: "Values") -> Mapping[str, Any]:
        return {"gradients": _gradients(values, loss, wrt)}

    return extend(graph, gradients, differentiable=wrt)


def extend(graph: Graph, addition: Addition, *, differentiable: Sequence[str] = ()) -> Graph:
    """Add outputs that are computed from variables: `extend(g, lambda v: {"twice": v["mm"] * 2})`.

    Args:
        addition: from variables, by name or path, to outputs by name; a dict is merged into one of the same name.
        differentiable: variables by which `addition` takes gradients with autograd.
    """
    wanted = {_find(graph, name) for name in differentiable}

    def after(node: fx.Node, value: Any) -> Any:
        # What comes from another of them has a history already, and gradients by it are taken as they are.
        return value.requires_grad_() if node in wanted and not value.requires_grad else value

    return _traced_again(graph, after, addition)


def replace_gradient(graph: Graph, name: str, function: Callable[[Tensor], Tensor]) -> Graph:
    """Let `function(variable)` stand for a variable, a gradient or another, wherever it is read.

    Args:
        name: the variable, by name or path: `outputs.gradients.weight`.
        function: gives a tensor of the same shape and type: `lambda g: g.clamp(-1, 1)`.

    Raises:
        GraphError: no such variable, or another shape or type.
    """
    wanted = _find(graph, name)

    def after(node: fx.Node, value: Any) -> Any:
        if node is not wanted:
            return value
        replaced = function(value)
        if replaced.shape != value.shape or replaced.dtype != value.dtype:
            found, before = (f"{t.dtype} {list(t.shape)}" for t in (replaced, value))
            raise GraphError(f"replacement is of another shape or type ({name}: {found}, was: {before})")
        return replaced

    return _traced_again(graph, after, lambda _values: {})


def update_state(graph: Graph, updates: Mapping[str, str]) -> Graph:
    """Let variables be the new state: `update_state(graph, {"state.weight": "outputs.new_weight"})`.

    Every operator goes on reading the old value: a graph has no writes, so there is no order to get wrong.
    """
    known = {path for path, _ in paths_of(graph.results) if path.partition(".")[0] == "state"}
    for path in updates:
        if path not in known:
            raise GraphError(f"not a place of the state ({path}); {nearest(path, known)}")
    edited, old = graph.edited(), graph.result_nodes
    names = {path: old[place].name for path, place in paths_of(graph.results)}
    names |= {path: _find(graph, name).name for path, name in updates.items()}
    order = list(dict.fromkeys(names.values()))
    copies = {node.name: node for node in edited.nodes.nodes}
    edited.nodes.output_node().args = (tuple(copies[name] for name in order),)
    results = relabel(graph.results, {path: order.index(name) for path, name in names.items()})
    after = replace(edited, results=results)
    remove_dead(after.nodes)
    check_graph(after)
    return after


class Values(Mapping[str, Tensor]):
    """The variables of a graph while it is traced again, by name or path."""

    def __init__(self, graph: Graph, values: Mapping[fx.Node, Any]) -> None:
        self._graph = graph
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = self._values[_find(self._graph, name)]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.variables)

    def __len__(self) -> int:
        return len(self._graph.variables)


def _find(graph: Graph, name: str) -> fx.Node:
    nodes = {node.name: node for node in graph.nodes.nodes if node.name in graph.variables}
    placeholders, results = graph.placeholders, graph.result_nodes
    paths = {path: results[place] for path, place in paths_of(graph.results) if path.startswith("outputs")}
    paths |= {path: placeholders[place] for path, place in paths_of(graph.arguments)}
    known: dict[str, fx.Node] = {**nodes, **paths}
    if name not in known:
        raise GraphError(f"no such variable ({name}); {nearest(name, known)}")
    return known[name]


def _gradients(values: Values, loss: str, wrt: Sequence[str]) -> dict[str, Tensor]:
    value = values[loss]
    if value.ndim != 0:
        raise GraphError(f"gradient is of a scalar only ({loss}: {list(value.shape)}); take a sum or a mean")
    inputs = [values[name] for name in wrt]
    if not value.requires_grad:
        raise GraphError(f"loss depends on none of these ({loss}, wrt: {', '.join(wrt)})")
    try:
        found = torch.autograd.grad(value, inputs, create_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        raise GraphError(f"an operator has no derivative ({error})") from error
    for name, gradient in zip(wrt, found, strict=True):
        if gradient is None:
            raise GraphError(f"loss does not depend on this ({loss}, wrt: {name}); leave it out")
    return dict(zip(wrt, found, strict=True))


def _traced_again(graph: Graph, after: Callable[[fx.Node, Any], Any], addition: Addition) -> Graph:
    origin = Origin()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        inputs = flatten_as(graph.arguments, {"state": state, "batch": batch}, len(likes))
        with torch.enable_grad():
            values = replay(graph.nodes, inputs, lifted(graph.constants), before=origin.follow, after=after)
            origin.follow(None)
            added = addition(Values(graph, values))
        filled = unflatten(graph.results, values[graph.nodes.output_node()])
        return _merged(filled["outputs"], added), filled["state"]

    fakes = [node.meta["val"] for node in graph.placeholders]
    likes = [example_of(fake) for fake in fakes]
    given = unflatten(graph.arguments, likes)
    dynamic = {path: names for path, leaf in paths_of(graph.arguments) if (names := names_of(fakes[leaf]))}
    return capture_noting(step, given["state"], given["batch"], origin.note, dynamic or None)


def _merged(outputs: Any, added: Mapping[str, Any]) -> Any:
    if not added:
        return outputs
    if not isinstance(outputs, dict):
        raise GraphError(f"outputs can be added to a dict only (found: {type(outputs).__name__}); return a dict")
    merged = dict(outputs)
    for name, value in added.items():
        before = merged.get(name)
        merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
