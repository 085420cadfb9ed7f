"""Tracing: recorded operators made into a graph.

    function  --record-->  operators  --functionalise, where a view was written to-->  pure  --tidy-->  Graph

Tensors are fake while recording, so nothing is computed. The second recording is there because a function that calls
autograd cannot be functionalised, while what was recorded of it, which calls none, can.

PyTorch's Python dispatcher would declare what batch norm writes, but it also swaps dropout and others for operators
that round differently. So it stays off, and the recorder declares batch norm's hidden write.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize

from weft.errors import GraphError
from weft.graph.capture.recorder import Cell, Recorder, lifted
from weft.graph.capture.source_lines import line_of, line_on_stack
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import replay, runner_of
from weft.graph.ir.pytree import Tree, paths_of
from weft.graph.ir.side_effects import remove_dead
from weft.graph.ir.symbolic_sizes import Condition, places_of
from weft.graph.ir.verification import check_graph
from weft.torch_private import DataDependentOutputException, DynamicOutputShapeException, autograd_numbers

__all__ = ["Origin", "add_placeholders", "build_graph", "note_call", "use_recording"]

aten = torch.ops.aten


def build_graph(
    recorder: Recorder,
    arguments: Tree,
    fakes: Sequence[Tensor],
    results: Tree,
    flat: Sequence[Tensor],
    mode: Any,
    conditions: Callable[[], tuple[Condition, ...]],
) -> Graph:
    """Make a graph of what was recorded, from these arguments to these results."""
    recorder.nodes.output(tuple(recorder.cell(tensor).node for tensor in flat))
    _give_backward_its_lines(recorder.nodes)
    cells = [recorder.cell(fake) for fake in fakes]
    returned = {path: recorder.cell(flat[leaf]) for path, leaf in paths_of(results)}
    _check_writes_are_returned(arguments, cells, returned, fakes)
    if recorder.num_unresolved:
        recorder = _functionalised(recorder, arguments, [fake.detach() for fake in fakes], mode)
    nodes = recorder.nodes
    _draw_in_memory_order(nodes)
    remove_dead(nodes)
    used = {node.target for node in nodes.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in recorder.constants.items() if name in used}
    graph = Graph(nodes, arguments, results, constants, conditions())
    check_graph(graph)
    return graph


def add_placeholders(recorder: Recorder, arguments: Tree, fakes: Sequence[Tensor]) -> None:
    """Add a placeholder for each argument, named after its place, `parameters_0_weight`, and not as a size is."""
    names: dict[int, str] = {}
    for path, leaf in paths_of(arguments):
        names.setdefault(leaf, path.partition(".")[2] or path)
    sizes = places_of(fakes)
    plain = ["".join(c if c.isalnum() else "_" for c in names[place]) for place in range(len(fakes))]
    plain = [f"{name}_input" if name in sizes else name for name in plain]
    for name, fake in zip(plain, fakes, strict=True):
        recorder.placeholder(name, fake)


@contextmanager
def use_recording(recorder: Recorder, mode: Any) -> Iterator[None]:
    """Run what is inside on fake tensors of this mode, and record all operators.

    Raises:
        GraphError: for what cannot be recorded; names the line.
    """
    torch.clear_autocast_cache()
    try:
        # With several threads, backward would run on another one, where the modes are not active.
        with mode, torch.autograd.set_multithreading_enabled(False), recorder:
            yield
    except (AssertionError, RuntimeError) as error:
        raise _explained(error) or error from None
    finally:
        torch.clear_autocast_cache()


def _functionalised(first: Recorder, arguments: Tree, fakes: Sequence[Tensor], mode: Any) -> Recorder:
    """Recorded again without writes to views. Each node inherits what is known of the node it comes from."""
    origin = Origin()
    second = Recorder(origin.note, resolve=False, run=runner_of(mode))
    add_placeholders(second, arguments, fakes)

    def run(*inputs: Tensor) -> Any:
        values = replay(first.nodes, inputs, lifted(first.constants), before=origin.follow)
        return values[first.nodes.output_node()]

    with use_recording(second, mode):
        returned = functionalize(run, remove="mutations")(*fakes)
        second.nodes.output(tuple(second.cell(tensor).node for tensor in returned))
    _remove_closing_copies(second.nodes)
    return second


class Origin:
    """The node that is being replayed; nodes that are recorded meanwhile get its line, part and grad mode."""

    def __init__(self) -> None:
        self._node: fx.Node | None = None

    def follow(self, node: fx.Node | None) -> None:
        self._node = node

    @property
    def line(self) -> str:
        return "unknown" if self._node is None else str(self._node.meta.get("line", "")) or "unknown"

    def note(self, node: fx.Node, is_backward: bool) -> None:
        if self._node is None:
            note_call(node, is_backward)
        else:
            node.meta.update({key: self._node.meta[key] for key in _NOTED if key in self._node.meta})


_NOTED = ("fills_memory", "in_grad_mode", "is_backward", "line")


def note_call(node: fx.Node, is_backward: bool) -> None:
    """Write into a node whether backward called for it, whether gradients were on, and the line of the user's code."""
    node.meta["is_backward"] = is_backward
    node.meta["in_grad_mode"] = torch.is_grad_enabled()
    node.meta["line"] = line_on_stack()
    node.meta["autograd"] = autograd_numbers()


def _give_backward_its_lines(nodes: fx.Graph) -> None:
    """Give each call of backward the line of its forward call: on the stack is only the line that called backward."""
    lines: dict[int, str] = {}
    for node in nodes.nodes:
        of, own = node.meta.pop("autograd", (None, -1))
        if of in lines:
            node.meta["line"] = lines[of]
        if "line" in node.meta:
            lines.setdefault(own, node.meta["line"])  # what autograd does not follow has the number of one before it


def _explained(error: BaseException) -> GraphError | None:
    """The error for a refusal of the fake tensors, with the line of the user's code that led to it."""
    where = line_of(error)
    if isinstance(error, DynamicOutputShapeException):
        return GraphError(f"a shape depends on the values of a tensor ({where}); use torch.where, or do it outside")
    if isinstance(error, DataDependentOutputException):
        return GraphError(
            f"step decides by the value of a tensor ({where}); use torch.where, or decide outside the step"
        )
    if "on tensor with symbolic sizes" in str(error):
        return GraphError(f"an operator cannot be captured for any size ({where}); leave its sizes out of dynamic")
    if "convert all Tensors to FakeTensors" in str(error):
        return GraphError(
            f"step uses a tensor that is in neither its state nor its batch ({where}); "
            "pass it in the state, or make it a buffer of its module"
        )
    return None


def _check_writes_are_returned(
    arguments: Tree, cells: Sequence[Cell], returned: dict[str, Cell], fakes: Sequence[Tensor]
) -> None:
    """Refuse a write in place to what is not in the new state: it would be lost."""
    if not any(cell.is_written for cell in cells):
        return
    holders: dict[int, list[str]] = {}  # by memory; two places of one tensor hold it once
    for path, leaf in paths_of(arguments):
        if cells[leaf].is_written and (not path.startswith("state") or returned.get(path) is not cells[leaf]):
            raise GraphError(f"step writes in place to what it does not return ({path}); return it in the state")
    for leaf, path in {leaf: path for path, leaf in paths_of(arguments)}.items():
        holders.setdefault(fakes[leaf].untyped_storage()._cdata, []).append(path)
    for cell, fake in zip(cells, fakes, strict=True):
        sharing = holders[fake.untyped_storage()._cdata]
        if cell.is_written and len(sharing) > 1:
            raise GraphError(f"step writes in place to memory that arguments share ({', '.join(sharing)}); clone one")


def _remove_closing_copies(graph: fx.Graph) -> None:
    """Functionalisation ends with copies into the arguments; their values are returned as it is."""
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            node.replace_all_uses_with(node.args[1])
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
