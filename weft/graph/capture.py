"""Capture: from a step written in Python to one graph of ATen operators, without running it.

    step(state, batch)  --trace-->  operators, writes in place among them  --functionalise-->  pure  --tidy-->  Graph

Tensors are fake while tracing, so nothing is computed. There are two traces because a function that calls autograd
cannot be functionalised, while its trace, which calls none, can. The second is left out where nothing is written.

PyTorch's Python dispatcher would declare what batch norm writes, but it also swaps dropout and others for operators
that round differently. So it stays off, and batch norm's hidden write is declared here.
"""

import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.graph import Graph
from weft.graph.replay import replay
from weft.graph.rewrites import remove_dead
from weft.graph.structure import Tree, fill, flatten, paths_of
from weft.graph.validity import check_graph
from weft.torch_private import (
    Annotate,
    DataDependentOutputException,
    DynamicOutputShapeException,
    fake_mode,
    functionalise,
    schema_of,
    trace,
)

__all__ = ["Origin", "Step", "capture", "capture_noting", "note_call"]

aten = torch.ops.aten

Step = Callable[[Any, Any], tuple[Any, Any]]
"""`(state, batch) -> (outputs, new state)`, pure; each a nested dict, list or tuple of tensors."""

_COPY = aten.lift_fresh_copy.default
_IDENTITIES = (aten.detach.default, aten.alias.default)
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<eval_with_key", "<frozen")
_SHIM = "torch_private.py"


def capture(step: Step, state: Any, batch: Any) -> Graph:
    """The graph of a step, for tensors of these shapes and types; their values do not matter.

    State that is written in place counts as returned only if the step returns it. Random numbers are drawn from the
    default generator, in the order of the operators that draw them.

    Raises:
        GraphError: the step uses a tensor from elsewhere, decides by a tensor's value, forgets a write, or returns a
            state of another form; names the line.

    >>> import torch
    >>> graph = capture(lambda state, batch: (state * batch, state + 1), torch.ones(2), torch.ones(2))
    >>> [operator.target for operator in graph.operators]
    ['aten.mul.Tensor', 'aten.add.Tensor']
    """
    return capture_noting(step, state, batch, note_call)


def capture_noting(step: Step, state: Any, batch: Any, note: Annotate) -> Graph:
    """Capture, with `note` writing what is known of each node into its meta, as `note_call` does."""
    leaves, arguments = flatten({"state": state, "batch": batch})
    returned: list[Tree] = []

    def flat_step(*tensors: Tensor) -> tuple[Any, ...]:
        given = fill(arguments, tensors)
        result = step(given["state"], given["batch"])
        if not isinstance(result, tuple) or len(result) != 2:
            raise GraphError(f"a step returns (outputs, new state) (found: {type(result).__name__}); return both")
        flat, tree = flatten({"outputs": result[0], "state": result[1]})
        returned.append(tree)
        return tuple(flat)

    module = _trace_pure(flat_step, leaves, note)
    _remove_identities(module.graph)
    _resolve_writes(module.graph, arguments, returned[0])
    _draw_in_memory_order(module.graph)
    remove_dead(module.graph)
    constants = {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}
    graph = Graph(_with_names(module.graph, arguments), arguments, returned[0], constants)
    check_graph(graph)
    return graph


def _trace_pure(flat_step: Callable[..., Any], leaves: Sequence[Tensor], note: Annotate) -> fx.GraphModule:
    mode = fake_mode()
    fakes = [mode.from_tensor(leaf.detach()).requires_grad_(leaf.requires_grad) for leaf in leaves]
    try:
        module = trace(flat_step, note, fakes, mode)
    except (AssertionError, DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _explained(error) or error from None
    _declare_batch_norm(module.graph)
    _remove_identities(module.graph)
    if not any(_is_write(node) for node in module.graph.nodes):
        return module
    return functionalise(*_again(module), [fake.detach() for fake in fakes], mode)


def _again(module: fx.GraphModule) -> tuple[Callable[..., Any], Annotate]:
    """Runs a traced graph, so that each node of the next trace inherits what is known of the node it comes from."""
    origin = Origin()

    def run(*inputs: Tensor) -> Any:
        values = replay(module.graph, inputs, partial(getattr, module), before=origin.follow)
        return values[module.graph.output_node()]

    return run, origin.note


class Origin:
    """The node that is being replayed: what is known of it is also true of the nodes that come of it."""

    def __init__(self) -> None:
        self._node: fx.Node | None = None

    def follow(self, node: fx.Node | None) -> None:
        self._node = node

    def note(self, node: fx.Node, is_backward: bool) -> None:
        if self._node is None:
            note_call(node, is_backward)
        else:
            node.meta.update({key: self._node.meta[key] for key in _NOTED if key in self._node.meta})


_NOTED = ("fills_memory", "in_grad_mode", "is_backward", "line")


def note_call(node: fx.Node, is_backward: bool) -> None:
    """Write into a node whether backward called for it, whether gradients were on, and the line of the user's code."""
    node.meta["is_backward"] = is_backward
    node.meta["fills_memory"] = node.target is aten.bernoulli_.float
    node.meta["in_grad_mode"] = torch.is_grad_enabled()
    node.meta["line"] = _line_on_stack()


def _line_on_stack() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_the_users(file):
            return f"{file.rpartition(os.sep)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def _is_the_users(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS) and not file.endswith((_SHIM, "contextlib.py"))


def _explained(error: BaseException) -> GraphError | None:
    """What a refusal of the fake tensors means, and the line of the user's code that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_users(frame.filename)]
    where = "unknown"
    if frames:
        last = frames[-1]
        code = linecache.getline(last.filename, last.lineno or 0).strip()
        where = f"{last.filename}:{last.lineno}: {code}"
    if isinstance(error, DynamicOutputShapeException):
        return GraphError(f"a shape depends on the values of a tensor ({where}); use torch.where, or do it outside")
    if isinstance(error, DataDependentOutputException):
        return GraphError(
            f"step decides by the value of a tensor ({where}); use torch.where, or decide outside the step"
        )
    if "convert all Tensors to FakeTensors" in str(error):
        return GraphError(
            f"step uses a tensor that is in neither its state nor its batch ({where}); "
            "pass it in the state, or make it a buffer of its module"
        )
    return None


def _declare_batch_norm(graph: fx.Graph) -> None:
    """native_batch_norm writes its running statistics and does not say so; its twin does, and computes the same."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm.default and node.args[3] is not None and node.args[5]:
            node.target = aten._native_batch_norm_legit.default


def _is_write(node: fx.Node) -> bool:
    schema = schema_of(node.target)
    return schema is not None and bool(schema.is_mutable)


def _resolve_writes(graph: fx.Graph, arguments: Tree, results: Tree) -> None:
    """Take out the closing copies into arguments. What was written must be in the new state, or it would be lost."""
    (values,) = graph.output_node().args
    places = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    new_state = {path: values[leaf] for path, leaf in paths_of(results)}  # type: ignore[index]
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in places:
            target, value = node.args[:2]
            for path, leaf in paths_of(arguments):
                is_kept = path.startswith("state") and new_state.get(path) in (value, node)
                if leaf == places[target] and not is_kept:
                    raise GraphError(
                        f"step writes in place to what it does not return ({path}); return it in the state"
                    )
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _remove_identities(graph: fx.Graph) -> None:
    """Take out what changes no value. One copy of a constant stays: it may be returned, and then be written to."""
    for node in list(graph.nodes):
        is_copy_of_copy = node.target is _COPY and node.args[0].target is _COPY
        if node.target in _IDENTITIES or is_copy_of_copy:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _draw_in_memory_order(graph: fx.Graph) -> None:
    """`bernoulli_` fills memory as it lies, its pure twin in the order of the dimensions: let the two orders agree."""
    for node in list(graph.nodes):
        like = node.args[0] if node.target is aten.bernoulli.p and node.meta.get("fills_memory", False) else None
        if like is not None and not like.meta["val"].is_contiguous():
            strides = like.meta["val"].stride()
            order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
            back = sorted(range(len(order)), key=order.__getitem__)
            with graph.inserting_before(node):
                straight = _permuted(graph, like, order, node)
                drawn = graph.node_copy(node, {like: straight}.__getitem__)
                drawn.meta["val"] = straight.meta["val"]
                node.replace_all_uses_with(_permuted(graph, drawn, back, node))
            graph.erase_node(node)


def _permuted(graph: fx.Graph, source: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    node = graph.call_function(aten.permute.default, (source, order))
    node.meta = {**like.meta, "val": source.meta["val"].permute(order)}
    return node


def _with_names(graph: fx.Graph, arguments: Tree) -> fx.Graph:
    """A copy whose placeholders are called after their places: `parameters_0_weight`."""
    paths: dict[int, str] = {}
    for path, leaf in paths_of(arguments):
        paths.setdefault(leaf, path.partition(".")[2] or path)
    named = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = named.placeholder("".join(c if c.isalnum() else "_" for c in paths[len(copies)]))
            copies[node].meta = dict(node.meta)
        else:
            copies[node] = named.node_copy(node, copies.__getitem__)
    return named
