"""The loop: iterations that carry values on, as one operator with a gradient."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.errors import GraphError
from weft.graph.ir.pytree import unflatten
from weft.graph.ir.symbolic_sizes import size_of
from weft.graph.loops.body import Iteration, flatten_each, record_body
from weft.graph.loops.checkpoint_schedule import checkpoints_for
from weft.graph.loops.operators import call_loop
from weft.torch_private import hint_of

__all__ = ["loop"]


def loop(
    body: Iteration, carried: Any, inputs: Any = (), *, num_iterations: Any = None, checkpoints: int | None = None
) -> tuple[Any, Any]:
    """Run the body once for each iteration, passing on what it carries, and stack its outputs.

    The body is recorded once for each call of `loop`, on tensors without values, and then run from its graph; in a
    step that is captured, the loop is one operator. It may read any tensor that it can see, and gradients reach those
    too. It draws no random numbers and writes in place to nothing that it did not make.

    Args:
        body: `body(counter, carried, inputs) -> (carried, outputs)`, one iteration. `counter` is its number, an int64
            tensor of no dimension. What it carries on has the form, shapes and types of what it was given.
        carried: nested dict, list or tuple of tensors, for the first iteration.
        inputs: the same, each with a dimension in front; an iteration gets its own part of each.
        num_iterations: a number, or a size such as `x.shape[1]`; by default that of the inputs.
        checkpoints: how many states to keep for the gradient; the others are computed again, each as few times as so
            many places allow. By default about the square root of twice the iterations, with which none is computed
            more than once again.

    Returns:
        `(carried, outputs)`; each output has a dimension for the iterations in front.

    Raises:
        GraphError: the body carries on something else, or does what it may not; the number of iterations is unclear.

    >>> import torch
    >>> loop(lambda i, total, x: (total + x, total), torch.tensor(0), torch.tensor([3, 4, 5]))
    (tensor(12), tensor([0, 3, 7]))
    """
    given, carried_tree = flatten_each(carried)
    parts, inputs_tree = flatten_each(inputs)
    count = _count(parts, num_iterations)
    if checkpoints is not None and checkpoints < 0:
        raise GraphError(f"a loop keeps 0 states or more (checkpoints: {checkpoints})")
    kept = checkpoints_for(hint_of(count)) if checkpoints is None else checkpoints
    key, captured, outputs_tree = record_body(body, given, carried_tree, parts, inputs_tree)
    made = call_loop(key, count, captured, given, parts, kept)
    return unflatten(carried_tree, made[: len(given)]), unflatten(outputs_tree, made[len(given) :])


def _count(inputs: Sequence[Tensor], num_iterations: Any) -> Any:
    if any(tensor.ndim == 0 for tensor in inputs):
        raise GraphError("an input of a loop has a dimension for the iterations in front (found: none)")
    counts = [tensor.shape[0] for tensor in inputs] + ([] if num_iterations is None else [num_iterations])
    if not counts:
        raise GraphError("number of iterations is not known; pass num_iterations, or inputs")
    if len({str(size_of(count)) for count in counts}) > 1:
        found = ", ".join(str(size_of(count)) for count in counts)
        raise GraphError(f"inputs of a loop and its number of iterations differ (found: {found})")
    if hint_of(counts[0]) < 0:
        raise GraphError(f"a loop has 0 iterations or more (num_iterations: {counts[0]})")
    return counts[0]
