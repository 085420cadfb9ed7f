"""Capture: from a step written in Python to one graph of ATen operators, without running it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from weft.errors import GraphError
from weft.graph.capture.dynamic_sizes import Dynamic, conditions_of, dims_of, fakes_of
from weft.graph.capture.recorder import Annotate, Recorder
from weft.graph.capture.tracing import add_placeholders, build_graph, note_call, use_recording
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import runner_of
from weft.graph.ir.pytree import Tree, flatten, unflatten

__all__ = ["Step", "capture", "capture_noting"]

Step = Callable[[Any, Any], tuple[Any, Any]]
"""`(state, batch) -> (outputs, new state)`, pure; each a nested dict, list or tuple of tensors."""


def capture(step: Step, state: Any, batch: Any, *, dynamic: Dynamic | None = None) -> Graph:
    """Trace a step into a graph of ATen operators, without running it.

    State that is written in place counts as returned only if the step returns it. Random numbers are drawn from the
    default generator, in the order of the operators that draw them.

    Args:
        step: `(state, batch) -> (outputs, new state)`, pure; it may call autograd.
        state, batch: examples: shapes, strides and types count, values do not.
        dynamic: dimensions that go by a name, and may be of any size from 2 when the graph runs: `"batch"` is
            dimension 0 of every tensor of the batch, `{"batch.x": {1: "length"}}` dimension 1 of one.

    Raises:
        GraphError: the step uses a tensor from elsewhere, decides by a tensor's value, forgets a write, returns a
            state of another form, or is right for one size only where any was asked for; names the line.

    >>> import torch
    >>> graph = capture(lambda state, batch: (state * batch, state + 1), torch.ones(2), torch.ones(2))
    >>> [operator.target for operator in graph.operators]
    ['aten.mul.Tensor', 'aten.add.Tensor']
    """
    return capture_noting(step, state, batch, note_call, dynamic)


def capture_noting(step: Step, state: Any, batch: Any, note: Annotate, dynamic: Dynamic | None = None) -> Graph:
    """Capture, with `note` writing what is known of each node into its meta, as `note_call` does."""
    leaves, arguments = flatten({"state": state, "batch": batch})
    mode, fakes = fakes_of(leaves, dims_of(dynamic, arguments, leaves), arguments)
    recorder = Recorder(note, run=runner_of(mode))
    add_placeholders(recorder, arguments, fakes)
    with use_recording(recorder, mode):
        given = unflatten(arguments, fakes)
        flat, results = _flat_results(step(given["state"], given["batch"]))
    return build_graph(recorder, arguments, fakes, results, flat, mode, lambda: conditions_of(mode, fakes))


def _flat_results(result: Any) -> tuple[list[Tensor], Tree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise GraphError(f"a step returns (outputs, new state) (found: {type(result).__name__}); return both")
    return flatten({"outputs": result[0], "state": result[1]})
