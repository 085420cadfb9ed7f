"""Edits of a graph: operators and variables added, removed and replaced. Each gives a new graph, checked.

    add_operator       a call on variables that are there; its outputs are variables for further edits
    remove_operator    a call whose outputs nobody reads
    replace_operator   another call in its place, with outputs of the same shapes and types
    replace_variable   whoever read one variable reads another
    add_input, remove_input, add_output, remove_output

Variables are given as objects, `graph.variables["mm"]`, among literals: `add_operator(g, aten.mul.Tensor, mm, 2)`.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError, nearest
from weft.graph.ir.graph import Graph, Operator, Variable, outputs_of
from weft.graph.ir.interpreter import runner_of
from weft.graph.ir.pytree import Tree, add_leaf, paths_of, relabel, remove_leaf
from weft.graph.ir.side_effects import is_collective, is_random
from weft.graph.ir.symbolic_sizes import resolved, sizes_by_name, spec_of
from weft.graph.ir.verification import check_graph
from weft.torch_private import mode_of, schema_of

__all__ = [
    "add_input",
    "add_operator",
    "add_output",
    "remove_input",
    "remove_operator",
    "remove_output",
    "replace_operator",
    "replace_variable",
]


def add_operator(
    graph: Graph, target: Any, *args: Any, name: str = "", line: str = "", **kwargs: Any
) -> tuple[Graph, Operator]:
    """Add a call at the end of a graph.

    Args:
        target: an operator, such as `torch.ops.aten.mul.Tensor`.
        args, kwargs: what it is called with; variables stand for their values.
        name: what it is to be called; by default after its operator.
        line: the line of code to show for it.

    Returns:
        The new graph, and the call in it.

    Raises:
        GraphError: not an operator, or one that writes in place; or these arguments are not for it.

    >>> from weft.graph.capture.capture import capture
    >>> graph = capture(lambda state, batch: (batch + 1, state), (), torch.ones(2))
    >>> graph, twice = add_operator(graph, torch.ops.aten.mul.Tensor, graph.variables["add"], 2)
    >>> twice.target, twice.outputs[0].shape
    ('aten.mul.Tensor', (2,))
    """
    edited = graph.edited()
    node = _insert(edited, target, args, kwargs, before=edited.nodes.output_node(), name=name)
    _add_items(edited, node)
    node.meta |= {"is_backward": False, "in_grad_mode": False, "line": line}
    after = _checked(edited)
    return after, _operator(after, node.name)


def remove_operator(graph: Graph, name: str) -> Graph:
    """Remove the call of that name.

    Raises:
        GraphError: something reads it; or it draws random numbers or talks to other ranks, and others would notice.
    """
    edited = graph.edited()
    node = _find(edited, _operator(graph, name).name)
    _refuse_to_lose(node)
    items = outputs_of(node)
    readers = [reader for output in (node, *items) for reader in output.users if reader not in items]
    if readers:
        found = ", ".join(dict.fromkeys("a result" if reader.op == "output" else reader.name for reader in readers))
        raise GraphError(f"operator is read ({name}, by: {found}); replace it, or remove those first")
    for item in items:
        edited.nodes.erase_node(item)
    edited.nodes.erase_node(node)
    return _checked(edited)


def replace_operator(graph: Graph, name: str, target: Any, *args: Any, **kwargs: Any) -> Graph:
    """Put another call in the place of the one of that name.

    Args:
        target, args, kwargs: as in `add_operator`.

    Raises:
        GraphError: as `add_operator`; or the outputs are not of the shapes and types of those replaced.
    """
    edited = graph.edited()
    old = _find(edited, _operator(graph, name).name)
    _refuse_to_lose(old)
    new = _insert(edited, target, args, kwargs, before=old)
    new.meta |= {key: value for key, value in old.meta.items() if key != "val"}
    _check_same(old, new)
    old.replace_all_uses_with(new)
    edited.nodes.erase_node(old)
    return _checked(edited)


def replace_variable(graph: Graph, old: Variable, new: Variable) -> Graph:
    """Let all calls and results that read `old` read `new`.

    Raises:
        GraphError: they are not of one shape and type, or `new` is made too late.
    """
    edited = graph.edited()
    before, after = _find(edited, old.name), _find(edited, new.name)
    _check_same(before, after)
    before.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    return _checked(edited)


def add_input(graph: Graph, path: str, like: Tensor) -> tuple[Graph, Variable]:
    """Add a tensor to the batch: `graph, mask = add_input(graph, "batch.mask", torch.ones(8))`.

    Args:
        like: of its shape and type; the values do not matter.

    Raises:
        GraphError: the path is not below `batch`, or is taken.
    """
    if path.partition(".")[0] != "batch":
        raise GraphError(f"an input is added to the batch (path: {path}); what is added to the state has to be updated")
    edited = graph.edited()
    place = len(edited.placeholders)
    first = next(node for node in edited.nodes.nodes if node.op != "placeholder")
    with edited.nodes.inserting_before(first):
        node = edited.nodes.placeholder("".join(c if c.isalnum() else "_" for c in path.partition(".")[2]))
    node.meta["val"] = _mode_of(edited).from_tensor(like.detach(), static_shapes=True)
    after = _checked(replace(edited, arguments=add_leaf(edited.arguments, path, place)))
    return after, after.variables[node.name]


def remove_input(graph: Graph, path: str) -> Graph:
    """Remove a tensor of the batch that nobody reads, by its path."""
    places = dict(paths_of(graph.arguments))
    if path not in places or path.partition(".")[0] != "batch":
        raise GraphError(f"no such input of the batch ({path}); {nearest(path, places)}")
    edited = graph.edited()
    node = edited.placeholders[places[path]]
    if node.users:
        raise GraphError(f"input is read ({path}, by: {', '.join(user.name for user in node.users)})")
    remaining = remove_leaf(edited.arguments, path)
    if places[path] not in [leaf for _, leaf in paths_of(remaining)]:
        edited.nodes.erase_node(node)
        remaining = _numbered_anew(remaining)
    return _checked(replace(edited, arguments=remaining))


def add_output(graph: Graph, path: str, variable: Variable) -> Graph:
    """Return one more variable: `add_output(graph, "outputs.norm", norm)`.

    Args:
        path: the name of the result, by which callers find it.
        variable: one of the graph's own.
    """
    if path.partition(".")[0] != "outputs":
        raise GraphError(f"not a place of the outputs ({path}); a place of the state is updated with update_state")
    edited = graph.edited()
    results = list(edited.result_nodes)
    edited.nodes.output_node().args = ((*results, _find(edited, variable.name)),)
    return _checked(replace(edited, results=add_leaf(edited.results, path, len(results))))


def remove_output(graph: Graph, path: str) -> Graph:
    """Return one variable less, by its path; operators that only it needed stay until `rewrite` removes dead code."""
    places = dict(paths_of(graph.results))
    if path not in places or path.partition(".")[0] != "outputs":
        raise GraphError(f"no such output ({path}); {nearest(path, places)}")
    edited = graph.edited()
    remaining = remove_leaf(edited.results, path)
    kept = sorted({leaf for _, leaf in paths_of(remaining)})
    results = edited.result_nodes
    edited.nodes.output_node().args = (tuple(results[leaf] for leaf in kept),)
    return _checked(replace(edited, results=_numbered_anew(remaining)))


def _insert(graph: Graph, target: Any, args: Any, kwargs: Any, *, before: fx.Node, name: str = "") -> fx.Node:
    """A call with its shape and type noted, which follow from what it is given."""
    schema = schema_of(target)
    if schema is None or schema.is_mutable:
        raise GraphError(f"not an operator that makes something new ({target}); name one of torch.ops, with overload")
    placed, named = _in_nodes((args, kwargs), graph)
    called = name or schema.name.partition("::")[2]
    with graph.nodes.inserting_before(before):
        node = graph.nodes.create_node("call_function", target, placed, named, name=called)
    node.meta["val"] = _made(graph, node)
    return node


def _in_nodes(value: Any, graph: Graph) -> Any:
    """Arguments with every variable replaced by its node."""
    return fx.node.map_aggregate(value, lambda item: _find(graph, item.name) if isinstance(item, Variable) else item)


def _made(graph: Graph, node: fx.Node) -> Any:
    sizes = sizes_by_name([placeholder.meta["val"] for placeholder in graph.placeholders])
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    args, kwargs = resolved((args, kwargs), sizes)
    mode = _mode_of(graph)
    try:
        with mode, torch.no_grad():
            return runner_of(mode)(node.target, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise GraphError(f"operator cannot be called with this ({node.target}: {error})") from error


def _add_items(graph: Graph, node: fx.Node) -> None:
    """Of a call with several outputs, each is a variable."""
    if isinstance(node.meta["val"], (tuple, list)):
        with graph.nodes.inserting_after(node):
            for i, value in reversed(list(enumerate(node.meta["val"]))):
                graph.nodes.call_function(operator.getitem, (node, i)).meta["val"] = value


def _operator(graph: Graph, name: str) -> Operator:
    known = {made.name: made for made in graph.operators}
    if name not in known:
        raise GraphError(f"no such operator ({name}); {nearest(name, known)}")
    return known[name]


def _find(graph: Graph, name: str) -> fx.Node:
    nodes: dict[str, fx.Node] = {node.name: node for node in graph.nodes.nodes}
    if name not in nodes:
        raise GraphError(f"no such variable in this graph ({name}); {nearest(name, nodes)}")
    return nodes[name]


def _mode_of(graph: Graph) -> Any:
    mode = mode_of(node.meta["val"] for node in graph.nodes.nodes if isinstance(node.meta.get("val"), Tensor))
    assert mode is not None, "a graph that was captured has fake tensors"
    return mode


def _refuse_to_lose(node: fx.Node) -> None:
    if is_random(node) or is_collective(node):
        raise GraphError(f"operator draws random numbers or talks to other ranks, and must stay ({node.name})")


def _check_same(old: fx.Node, new: fx.Node) -> None:
    was, becomes = spec_of(old.meta["val"]), spec_of(new.meta["val"])
    if was != becomes:
        raise GraphError(f"replacement is of another shape or type ({old.name}: {was}, becomes: {becomes})")


def _numbered_anew(tree: Tree) -> Tree:
    """The leaves that are left, numbered without gaps in the order they had."""
    places = list(paths_of(tree))
    order = {leaf: i for i, leaf in enumerate(sorted({leaf for _, leaf in places}))}
    return relabel(tree, {path: order[leaf] for path, leaf in places})


def _checked(graph: Graph) -> Graph:
    check_graph(graph)
    return graph
