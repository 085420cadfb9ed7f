"""The body of a loop as a graph: one iteration, recorded.

    state     what is carried from one iteration to the next
    batch     counter, inputs (this iteration's part of each), captured (whatever else the body reads)
    outputs   this iteration's part of each

All tensors lie in memory without gaps, in the order of their dimensions, so that one graph serves every iteration.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import GraphError
from weft.graph.capture.recorder import Recorder
from weft.graph.capture.tracing import add_placeholders, build_graph, note_call, use_recording
from weft.graph.formats.loop_bodies import hash_of_body, register_body
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import runner_of
from weft.graph.ir.pytree import Tree, flatten, paths_of, relabel, unflatten
from weft.graph.ir.symbolic_sizes import Size, shape_of
from weft.torch_private import fake_mode, mode_of, use_no_modes

__all__ = ["Iteration", "flatten_each", "record_body"]

Iteration = Callable[[Tensor, Any, Any], tuple[Any, Any]]
"""`body(counter, carried, inputs) -> (carried, outputs)`."""


def flatten_each(value: Any) -> tuple[list[Tensor], Tree]:
    """The tensors of a nested value, one that stands in two places twice, and the tree of their places."""
    leaves, tree = flatten(value)
    places = list(paths_of(tree))
    return [leaves[leaf] for _, leaf in places], relabel(tree, {path: i for i, (path, _) in enumerate(places)})


def record_body(
    function: Iteration, carried: Sequence[Tensor], carried_tree: Tree, inputs: Sequence[Tensor], inputs_tree: Tree
) -> tuple[str, list[Tensor], Tree]:
    """Record one iteration: the hash of its graph, the tensors that it reads from outside, the tree of its outputs."""
    mode = mode_of((*carried, *inputs)) or fake_mode()
    with use_no_modes(), torch.no_grad():
        fakes = [_like(mode, shape_of_item, like) for shape_of_item, like in _shapes(carried, inputs)]
        recorder = Recorder(note_call, run=runner_of(mode), outside=lambda tensor: _stand_in(mode, tensor))
        add_placeholders(recorder, _arguments(len(carried), len(inputs), 0), fakes)
        with use_recording(recorder, mode):
            state = unflatten(carried_tree, fakes[: len(carried)])
            item = unflatten(inputs_tree, fakes[len(carried) + 1 :])
            flat, outputs_tree = _checked(function(fakes[len(carried)], state, item), carried_tree)
            flat = [recorder.inside(tensor) for tensor in flat]
        fakes += [fake for _, fake in recorder.captured]
        results = _results(len(carried), len(flat) - len(carried))
        arguments = _arguments(len(carried), len(inputs), len(recorder.captured))
        graph = build_graph(recorder, arguments, fakes, results, flat, mode, tuple)
    _refuse_what_cannot_be_repeated(graph)
    key = hash_of_body(graph)
    register_body(key, graph)
    return key, [tensor for tensor, _ in recorder.captured], outputs_tree


def _shapes(carried: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Any, Tensor]]:
    counter = torch.empty((), dtype=torch.int64, device="meta")
    return [
        *((tensor.shape, tensor) for tensor in carried),
        ((), counter),
        *((tensor.shape[1:], tensor) for tensor in inputs),
    ]


def _like(mode: Any, shape: Any, like: Tensor) -> Tensor:
    device = "cpu" if like.device.type == "meta" else like.device
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=device)


def _stand_in(mode: Any, tensor: Tensor) -> Tensor:
    """A tensor from outside, as the body sees it: without gaps, whatever it is now."""
    return _like(mode, tensor.shape, tensor)


def _arguments(num_carried: int, num_inputs: int, num_captured: int) -> Tree:
    counter = num_carried
    first = counter + 1 + num_inputs
    batch = (
        ("counter", ("leaf", counter)),
        ("inputs", _leaves(counter + 1, num_inputs)),
        ("captured", _leaves(first, num_captured)),
    )
    return "dict", (("state", _carried(num_carried)), ("batch", ("dict", batch)))


def _results(num_carried: int, num_outputs: int) -> Tree:
    return "dict", (("outputs", _leaves(num_carried, num_outputs)), ("state", _carried(num_carried)))


def _carried(count: int) -> Tree:
    return "dict", (("carried", _leaves(0, count)),)


def _leaves(first: int, count: int) -> Tree:
    return "tuple", tuple(("leaf", first + i) for i in range(count))


def _checked(result: Any, carried_tree: Tree) -> tuple[list[Tensor], Tree]:
    """The tensors that are carried on, then the outputs; and the tree of the outputs."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise GraphError(f"the body of a loop returns (carried, outputs) (found: {type(result).__name__}); return both")
    carried, tree = flatten_each(result[0])
    if tree != carried_tree:
        raise GraphError("the body of a loop carries on what it was given, in the same form; return that first")
    outputs, outputs_tree = flatten_each(result[1])
    return [*carried, *outputs], outputs_tree


def _refuse_what_cannot_be_repeated(graph: Graph) -> None:
    if graph.uses_random:
        raise GraphError(
            "the body of a loop draws random numbers, which its gradient could not draw again; "
            "draw them before the loop, and pass them as inputs"
        )
    for node in (*graph.placeholders, *graph.result_nodes):
        odd = [size for size in shape_of(node.meta["val"]) if isinstance(size, Size) and size.kind != "name"]
        if odd:
            raise GraphError(f"a size inside a loop is a name or a number ({node.name}: {odd[0]}); reshape it inside")
