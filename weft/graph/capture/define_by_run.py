"""Define-by-run: a step that is executed as it is written, and recorded on the way."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import GraphError
from weft.graph.capture.capture import capture_noting
from weft.graph.capture.recorder import Recorder, lifted
from weft.graph.capture.tracing import Origin, add_placeholders, note_call
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import replay
from weft.graph.ir.pytree import flatten, flatten_as, unflatten
from weft.torch_private import DynamicOutputShapeException, use_no_modes

__all__ = ["Recording", "record"]


class Recording:
    """The operators that ran inside `record`; `graph` makes a graph of them."""

    def __init__(self, state: Any, batch: Any) -> None:
        self._leaves, self._arguments = flatten({"state": state, "batch": batch})
        self._recorder = Recorder(note_call, resolve=False, keep=_without_values)
        add_placeholders(self._recorder, self._arguments, self._leaves)

    def graph(self, outputs: Any, state: Any) -> Graph:
        """The operators that led to these outputs and this new state, as a step that runs again and can be extended.

        Python's decisions are those of this run. Sizes are those of this run too.

        Raises:
            GraphError: as `capture`; or a shape depends on the values of a tensor, so that it could not run again.
        """
        flat, results = flatten({"outputs": outputs, "state": state})
        nodes = [self._recorder.cell(tensor).node for tensor in flat]
        recorded, origin = _closed(self._recorder.nodes, nodes), Origin()

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            inputs = flatten_as(self._arguments, {"state": state, "batch": batch}, len(self._leaves))
            try:
                with torch.no_grad():
                    values = replay(recorded, inputs, lifted(self._recorder.constants), before=origin.follow)
            except DynamicOutputShapeException:
                raise GraphError(
                    f"a shape depends on the values of a tensor ({origin.line}); use torch.where, or do it outside"
                ) from None
            filled = unflatten(results, values[recorded.output_node()])
            return filled["outputs"], filled["state"]

        with use_no_modes():  # it may be called while recording goes on
            given = unflatten(self._arguments, [leaf.detach() for leaf in self._leaves])
            return capture_noting(step, given["state"], given["batch"], origin.note)


@contextmanager
def record(state: Any, batch: Any) -> Iterator[Recording]:
    """Run what is inside as it is written, on real values, and record it.

    Unlike a step that is captured, it may look at values and decide by them, call `backward` and an optimizer of
    PyTorch, and write to its state in place. Every tensor that it reads is in the state or the batch, or made inside.

    Args:
        state, batch: nested dicts, lists or tuples of tensors, as a step takes them.

    >>> import torch
    >>> from weft.graph import Program
    >>> w, x = torch.ones(2), torch.tensor([1.0, 2.0])
    >>> with record(w, x) as recording:
    ...     y = w * x if x.sum() > 0 else w - x
    >>> graph = recording.graph(y, w)
    >>> y, Program(graph)(w, torch.tensor([5.0, 6.0]))[0]
    (tensor([1., 2.]), tensor([5., 6.]))
    """
    recording = Recording(state, batch)
    with torch.autograd.set_multithreading_enabled(False), recording._recorder:
        yield recording


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _closed(nodes: fx.Graph, results: list[fx.Node]) -> fx.Graph:
    """A copy that returns these nodes; recording may go on."""
    closed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    closed.graph_copy(nodes, copies)
    closed.output(tuple(copies[node] for node in results))
    return closed
