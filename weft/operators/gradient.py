"""The `backward(grads, inputs, outputs)` of a user, checked and made into what autograd calls.

Direct: autograd runs it, so that a graph shows its operators and its gradient can be taken in turn.
Opaque: it is an operator itself, `<name>_backward`, so that it may hold anything.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.errors import UsageError
from weft.operators.definition import Backward

__all__ = ["DirectGradient", "OpaqueGradient", "as_gradients"]


Complete = Callable[[Sequence[Any]], tuple[Any, ...]]


@final
class DirectGradient:
    """The user's function, run by autograd."""

    def __init__(self, name: str, backward: Backward) -> None:
        self._name = name
        self._backward = backward

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)

    def backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = _restore(ctx)
        return as_gradients(self._backward(grads, inputs, outputs), inputs, self._name)


@final
class OpaqueGradient:
    """The user's function as an operator of its own. It is told of every gradient, and gives those that are wanted."""

    def __init__(self, name: str, schema: str, backward: Backward, complete: Complete) -> None:
        self._name = name
        self._backward = backward
        self._complete = complete
        arguments = schema.partition("->")[0].strip().removeprefix("(").removesuffix(")")
        self._operator = torch.library.custom_op(
            f"{name}_backward",
            self._run,
            mutates_args=(),
            schema=f"(Tensor[] grads, Tensor[] outputs, bool[] wanted, {arguments}) -> Tensor[]",
        )
        self._operator.register_fake(_empty_gradients)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save(ctx, inputs, output)

    def backward(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = _restore(ctx)
        wanted = [bool(need) for need in ctx.needs_input_grad]
        found = iter(self._operator(list(grads), list(outputs), wanted, *inputs))
        return tuple(next(found) if need else None for need in wanted)

    def _run(self, grads: Any, outputs: Any, wanted: Sequence[bool], *given: Any) -> list[Tensor]:
        inputs = self._complete(given)
        gradients = as_gradients(self._backward(tuple(grads), inputs, tuple(outputs)), inputs, self._name)
        taken = {tensor.untyped_storage().data_ptr() for tensor in (*grads, *outputs, *_tensors(inputs))}
        results = []
        for i, need in enumerate(wanted):
            if not need:
                continue
            gradient = gradients[i]
            fresh = torch.zeros_like(inputs[i]) if gradient is None else gradient
            fresh = fresh.contiguous()
            # An operator may not give what it was given, nor one tensor twice: a sum's gradient is its argument.
            if fresh.untyped_storage().data_ptr() in taken:
                fresh = fresh.clone()
            taken.add(fresh.untyped_storage().data_ptr())
            results.append(fresh)
        return results


def as_gradients(result: Any, inputs: tuple[Any, ...], name: str) -> tuple[Tensor | None, ...]:
    """The result of `backward` as one entry for each input, in the input's shape.

    Autograd itself would quietly sum a gradient that is too large down to the input's shape.
    """
    gradients = (result,) if isinstance(result, Tensor) or result is None else tuple(result)
    if len(gradients) != len(inputs):
        raise UsageError(
            f"backward gives {len(gradients)} gradients for {len(inputs)} inputs (operator: {name}); "
            "give one for each input, None for what has none"
        )
    for i, (gradient, value) in enumerate(zip(gradients, inputs, strict=True)):
        if isinstance(gradient, Tensor) and isinstance(value, Tensor) and gradient.shape != value.shape:
            raise UsageError(
                f"a gradient has not the shape of its input (operator: {name}, input: {i}, "
                f"gradient: {list(gradient.shape)}, input's shape: {list(value.shape)}); "
                "sum over the axes that were broadcast"
            )
    return gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    leaves, ctx.structure = tree_flatten((tuple(inputs), tuple(outputs)))
    ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
    ctx.others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]


def _restore(ctx: Any) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    saved = iter(ctx.saved_tensors)
    leaves = [next(saved) if other is None else other[0] for other in ctx.others]
    inputs, outputs = tree_unflatten(leaves, ctx.structure)
    return inputs, outputs


def _empty_gradients(grads: Any, outputs: Any, wanted: Sequence[bool], *inputs: Any) -> list[Tensor]:
    return [inputs[i].new_empty(inputs[i].shape) for i, need in enumerate(wanted) if need]


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
