"""Verification of graphs: the rules of a valid one, which are run after capture and after every pass."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import runner_of
from weft.graph.ir.pytree import paths_of
from weft.graph.ir.side_effects import is_collective, is_random
from weft.graph.ir.symbolic_sizes import Size, resolved, sizes_by_name, sizes_in, spec_of
from weft.torch_private import schema_of

__all__ = ["RULES", "check_graph", "check_pass", "check_shapes"]

GraphRule = Callable[[Graph], Iterator[str]]

_START, _WAIT = "weft.all_reduce.default", "weft.wait.default"
_LITERALS = (bool, int, float, complex, str, Size, torch.dtype, torch.device, torch.layout, torch.memory_format)


def check_graph(graph: Graph) -> None:
    """Raise GraphError with the first rule that the graph breaks."""
    for rule in RULES:
        for fault in rule(graph):
            raise GraphError(f"graph is not valid ({fault})")


def check_pass(before: Graph, after: Graph) -> None:
    """Check that a pass kept what a graph takes, gives, draws and exchanges.

    Raises:
        GraphError: the new graph is not valid; or its arguments, results, conditions, random draws or collectives are
            not those of the old one.
    """
    check_graph(after)
    if (before.arguments, before.results) != (after.arguments, after.results):
        raise GraphError("pass changed the arguments or the results of the graph")
    if before.conditions != after.conditions:
        raise GraphError("pass changed the conditions on the sizes of the graph")
    if _specs(before.placeholders) != _specs(after.placeholders):
        raise GraphError("pass changed the shape or type of an argument")
    if _specs(before.result_nodes) != _specs(after.result_nodes):
        raise GraphError("pass changed the shape or type of a result")
    calls = [[(str(n.target), n.args[1:]) for n in graph.nodes.nodes if is_collective(n)] for graph in (before, after)]
    if calls[0] != calls[1]:
        raise GraphError("pass removed, added or moved an operator that talks to other ranks")
    draws = [[str(node.target) for node in graph.nodes.nodes if is_random(node)] for graph in (before, after)]
    if draws[0] != draws[1]:
        raise GraphError("pass removed, added or moved an operator that draws random numbers")


def check_shapes(graph: Graph) -> None:
    """Raise GraphError if an operator, given the shapes of its inputs, makes another shape or type than is noted.

    It asks every operator, so it takes about as long as a capture.
    """
    sizes = sizes_by_name([node.meta["val"] for node in graph.placeholders])
    for node in graph.nodes.nodes:
        if node.op != "call_function":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        args, kwargs = resolved((args, kwargs), sizes)
        modes = {value.fake_mode for value in _tensors((args, kwargs)) if hasattr(value, "fake_mode")}
        if len(modes) != 1:
            continue  # nothing but numbers: there is no shape to go by
        (mode,) = modes
        with mode:
            made = runner_of(mode)(node.target, *args, **kwargs)
        if spec_of(made) != spec_of(node.meta["val"]):
            raise GraphError(
                f"graph is not valid (shape of {node.name}: {spec_of(node.meta['val'])}, made: {spec_of(made)})"
            )


def _known_kinds(graph: Graph) -> Iterator[str]:
    nodes = list(graph.nodes.nodes)
    for node in nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield f"node {node.name} is of kind {node.op}"
    if not nodes or nodes[-1].op != "output" or sum(node.op == "output" for node in nodes) != 1:
        yield "there is not one output node at the end"


def _order(graph: Graph) -> Iterator[str]:
    """A variable is made before it is read."""
    made: set[fx.Node] = set()
    for node in graph.nodes.nodes:
        for source in node.all_input_nodes:
            if source not in made:
                yield f"{node.name} reads {source.name} before it is made"
        made.add(node)


def _arguments(graph: Graph) -> Iterator[str]:
    nodes = list(graph.nodes.nodes)
    count = len(graph.placeholders)
    if any(node.op != "placeholder" for node in nodes[:count]):
        yield "an argument stands behind an operator"
    places = {leaf for _, leaf in paths_of(graph.arguments)}
    if places != set(range(count)):
        yield f"arguments and their places differ (arguments: {count}, places: {len(places)})"


def _calls(graph: Graph) -> Iterator[str]:
    """A call is an ATen-like operator that writes to nothing, or takes one output of several."""
    for node in graph.nodes.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            source, index = node.args
            values = source.meta.get("val") if isinstance(source, fx.Node) else None
            if not isinstance(values, (tuple, list)) or not isinstance(index, int) or not 0 <= index < len(values):
                yield f"{node.name} takes output {index} of {source}, which has none of that number"
        elif schema_of(node.target) is None:
            yield f"{node.name} calls {node.target}, which is no operator"
        elif schema_of(node.target).is_mutable:
            yield f"{node.name} writes in place ({node.target})"


def _signatures(graph: Graph) -> Iterator[str]:
    """An operator gets what its schema asks for, and only nodes and literals."""
    for node in graph.nodes.nodes:
        schema = schema_of(node.target)
        if schema is None:
            continue
        declared = schema.arguments
        given = {a.name for a in declared[: len(node.args)]} | set(node.kwargs)
        missing = [a.name for a in declared if not a.has_default_value() and a.name not in given]
        unknown = set(node.kwargs) - {a.name for a in declared}
        if missing or unknown or len(node.args) > len(declared):
            wrong = f"missing: {missing}, unknown: {sorted(unknown)}"
            yield f"{node.name} does not fit its operator ({node.target}, {wrong})"
        for value in _literals((node.args, node.kwargs)):
            if value is not None and not isinstance(value, _LITERALS):
                yield f"{node.name} holds a {type(value).__name__}, which is neither a variable nor a literal"


def _values(graph: Graph) -> Iterator[str]:
    """Shapes and types are known, and constants hold real values."""
    for node in graph.nodes.nodes:
        if node.op != "output" and "val" not in node.meta:
            yield f"shape and type of {node.name} are not noted"
        if node.op == "get_attr":
            value = graph.constants.get(str(node.target))
            if value is None or hasattr(value, "fake_mode"):
                yield f"constant {node.target} has no value"
            elif spec_of(value) != spec_of(node.meta.get("val")):
                yield f"constant {node.target} is not of the shape or type noted"


def _results(graph: Graph) -> Iterator[str]:
    nodes = graph.result_nodes
    places = [leaf for _, leaf in paths_of(graph.results)]
    if sorted(set(places)) != list(range(len(nodes))):
        yield f"results and their places differ (results: {len(nodes)}, places: {len(set(places))})"
    elif not all(isinstance(node, fx.Node) for node in nodes):
        yield "a result is no variable"


def _new_state(graph: Graph) -> Iterator[str]:
    """The new state has the form of the old one, so that it can be the next step's; what was tied stays tied."""
    nodes, placeholders = graph.result_nodes, graph.placeholders
    old = {path: leaf for path, leaf in paths_of(graph.arguments) if path.partition(".")[0] == "state"}
    new = {path: leaf for path, leaf in paths_of(graph.results) if path.partition(".")[0] == "state"}
    for path in old.keys() ^ new.keys():
        yield f"{path} is in the {'old' if path in old else 'new'} state only"
    became: dict[int, tuple[str, fx.Node]] = {}
    for path in old.keys() & new.keys():
        before, after = placeholders[old[path]], nodes[new[path]]
        if spec_of(before.meta.get("val")) != spec_of(after.meta.get("val")):
            yield f"{path} changes (was: {spec_of(before.meta['val'])}, becomes: {spec_of(after.meta['val'])})"
        first, other = became.setdefault(old[path], (path, after))
        if other is not after:
            yield f"{first} and {path} are one tensor and become two"


def _promises(graph: Graph) -> Iterator[str]:
    """An all-reduce that was started is waited for once, and read by nobody before."""
    for node in graph.nodes.nodes:
        readers = [str(user.target) for user in node.users]
        if str(node.target) == _START and readers != [_WAIT]:
            yield f"{node.name} is to be waited for once (readers: {', '.join(readers) or 'none'})"
        if str(node.target) == _WAIT and not (isinstance(node.args[0], fx.Node) and str(node.args[0].target) == _START):
            yield f"{node.name} waits for what was not started ({node.args[0]})"


def _sizes(graph: Graph) -> Iterator[str]:
    """A named size is a dimension of an argument."""
    for node in graph.nodes.nodes:
        for size in sizes_in((node.args, node.kwargs)):
            if not size.names <= graph.sizes.keys():
                yield f"{node.name} reads a size that no argument has ({size})"
    for condition in graph.conditions:
        if not condition.names <= graph.sizes.keys():
            yield f"a condition is on a size that no argument has ({condition})"


RULES: tuple[GraphRule, ...] = (
    _known_kinds,
    _order,
    _arguments,
    _calls,
    _signatures,
    _values,
    _results,
    _new_state,
    _sizes,
    _promises,
)


def _specs(nodes: Any) -> list[Any]:
    return [spec_of(node.meta["val"]) for node in nodes]


def _tensors(value: Any) -> Iterator[Any]:
    return (item for item in _literals(value) if isinstance(item, Tensor))


def _literals(value: Any) -> Iterator[Any]:
    """Everything inside nested tuples, lists and dicts that is no node."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _literals(item)
    elif isinstance(value, dict):
        yield from _literals(list(value.values()))
    elif isinstance(value, slice):
        yield from _literals([value.start, value.stop, value.step])
    elif not isinstance(value, fx.Node):
        yield value
