"""Loops as operators of PyTorch: one call in a graph, whatever the number of iterations.

    weft::loop            what was carried last, then each output with a dimension for the iterations in front
    weft::loop_kept       the same, and the states that a gradient needs, with a dimension for checkpoints in front
    weft::loop_backward   the gradients of what was captured, of what was carried first, and of the inputs

A loop that is differentiated is a `loop_kept`: autograd makes it one. Memory: forward holds two states and the
checkpoints, backward at most as many states again, since those that forward kept belong to whoever called it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.graph.formats.loop_bodies import find_body
from weft.graph.loops.checkpoint_schedule import first_checkpoints
from weft.graph.loops.gradient import is_differentiable
from weft.graph.loops.running import LoopCall, Tensors, outputs_like, run_backward, run_forward
from weft.torch_private import use_no_autograd

__all__ = ["call_loop"]

_LIBRARY = torch.library.Library("weft", "FRAGMENT")
_TAKES = "str body, SymInt num_iterations, Tensor[] captured, Tensor[] carried, Tensor[] inputs, int checkpoints"


def call_loop(key: str, count: Any, captured: Tensors, carried: Tensors, inputs: Tensors, checkpoints: int) -> Any:
    """`weft::loop` on real tensors, or recorded."""
    return torch.ops.weft.loop.default(key, count, captured, carried, inputs, checkpoints)


def _loop(*given: Any) -> list[Tensor]:
    return run_forward(LoopCall(*given))


def _loop_shapes(*given: Any) -> list[Tensor]:
    call = LoopCall(*given)
    return [*(tensor.new_empty(tensor.shape) for tensor in call.carried), *outputs_like(call)]


def _loop_kept(*given: Any) -> list[Tensor]:
    call = LoopCall(*given)
    kept = _memory_for(call)
    return [*run_forward(call, first_checkpoints(call.count, call.checkpoints), kept), *kept]


def _loop_kept_shapes(*given: Any) -> list[Tensor]:
    return [*_loop_shapes(*given), *_memory_for(LoopCall(*given))]


def _loop_backward(*given: Any) -> list[Tensor]:
    *first, kept, gradients = given
    call = LoopCall(*first)
    steps = first_checkpoints(call.count, call.checkpoints)
    states = {step: [tensor[place] for tensor in kept] for place, step in enumerate(steps)}
    return run_backward(call, states, gradients)


def _loop_backward_shapes(*given: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in LoopCall(*given[:6]).tensors if is_differentiable(t)]


def _memory_for(call: LoopCall) -> list[Tensor]:
    return [tensor.new_empty((call.checkpoints, *tensor.shape)) for tensor in call.carried]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: str, count: Any, checkpoints: int, num_captured: int, num_carried: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        parts = tensors[:num_captured], tensors[num_captured:][:num_carried], tensors[num_captured + num_carried :]
        made = torch.ops.weft.loop_kept.default(key, count, *parts, checkpoints)
        kept = made[len(made) - num_carried :]
        ctx.settings = key, count, checkpoints, num_captured, num_carried, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        results = made[: len(made) - num_carried]
        ctx.is_differentiable = [is_differentiable(tensor) for tensor in results]
        ctx.mark_non_differentiable(*kept, *(tensor for tensor in results if not is_differentiable(tensor)))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        key, count, checkpoints, num_captured, num_carried, num_tensors = ctx.settings
        tensors, kept = ctx.saved_tensors[:num_tensors], ctx.saved_tensors[num_tensors:]
        parts = tensors[:num_captured], tensors[num_captured:][:num_carried], tensors[num_captured + num_carried :]
        wanted = [g for g, is_one in zip(gradients, ctx.is_differentiable, strict=False) if is_one]
        found = torch.ops.weft.loop_backward.default(key, count, *parts, checkpoints, kept, wanted)
        following = iter(found)
        return (None,) * 5 + tuple(next(following) if is_differentiable(tensor) else None for tensor in tensors)


class _OnceOnly(torch.autograd.Function):
    """Without it, the gradient of a loop would count as a constant, and a gradient of a gradient be silently wrong."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], list[Tensor]], *_tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call())

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        raise NotImplementedError("a loop has no second derivative; write its iterations out")


def _loop_with_autograd(*given: Any) -> list[Tensor]:
    call = LoopCall(*given)
    if _needs_gradient(call.tensors):
        made = torch.ops.weft.loop_kept.default(*given)
        return list(made[: len(find_body(call.key).result_nodes)])
    with use_no_autograd():
        return list(torch.ops.weft.loop.default(*given))


def _loop_kept_with_autograd(*given: Any) -> list[Tensor]:
    call = LoopCall(*given)
    if _needs_gradient(call.tensors):
        settings = call.key, call.count, call.checkpoints, len(call.captured), len(call.carried)
        return list(_Differentiable.apply(*settings, *call.tensors))  # type: ignore[no-untyped-call]
    with use_no_autograd():
        return list(torch.ops.weft.loop_kept.default(*given))


def _loop_backward_with_autograd(*given: Any) -> list[Tensor]:
    def run() -> list[Tensor]:
        with use_no_autograd():
            return list(torch.ops.weft.loop_backward.default(*given))

    tensors = [*LoopCall(*given[:6]).tensors, *given[6], *given[7]]
    if _needs_gradient(tensors):
        return list(_OnceOnly.apply(run, *tensors))  # type: ignore[no-untyped-call]
    return run()


def _needs_gradient(tensors: Tensors) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _define(name: str, takes: str, run: Any, shapes: Any, with_autograd: Any) -> None:
    _LIBRARY.define(f"{name}({takes}) -> Tensor[]")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(f"weft::{name}", shapes, lib=_LIBRARY)


_define("loop", _TAKES, _loop, _loop_shapes, _loop_with_autograd)
_define("loop_kept", _TAKES, _loop_kept, _loop_kept_shapes, _loop_kept_with_autograd)
_define(
    "loop_backward",
    f"{_TAKES}, Tensor[] kept, Tensor[] gradients",
    _loop_backward,
    _loop_backward_shapes,
    _loop_backward_with_autograd,
)
