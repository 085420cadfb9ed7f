"""Collectives as operators: pure, recorded in a graph, and carried out by whoever stands for the group.

    promise = weft::all_reduce(gradient, "mean", "world")     starts, and goes on
    ...                                                       the rest of backward
    mean    = weft::wait(promise)                             the result, in memory of its own

A promise has the shape of the result and no content: it is NaN until it has been waited for. Each is waited for once.

A graph names its groups; `use_collectives` says, for the code inside, what starts an all-reduce in them. So one graph
reaches every kind of group, and ranks that are threads of one process have each their own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import GraphError, nearest

__all__ = ["StartAllReduce", "all_reduce", "start_all_reduce", "use_collectives", "wait"]

StartAllReduce = Callable[[Tensor, str], Callable[[], None]]
"""Starts to reduce a tensor in place by "sum", "mean", "min", "max" or "product"; what it returns waits for the end."""

_OPS = ("sum", "mean", "min", "max", "product")
_HANDLERS: ContextVar[Mapping[str, StartAllReduce]] = ContextVar("weft collectives", default={})  # noqa: B039 -- never written to
_LIBRARY = torch.library.Library("weft", "FRAGMENT")


@dataclass(frozen=True)
class _Pending:
    promise: Tensor  # held, so that no other has its address
    result: Tensor
    wait: Callable[[], None]


_PENDING: dict[int, _Pending] = {}


@contextmanager
def use_collectives(start: StartAllReduce, group: str = "world") -> Iterator[None]:
    """Let `start` carry out the all-reduces of a group, for all that runs inside, on this thread.

    Args:
        start: takes a tensor and an operation, begins to reduce the tensor in place, and returns a wait function.
        group: the name by which graphs call the group.
    """
    token = _HANDLERS.set({**_HANDLERS.get(), group: start})
    try:
        yield
    finally:
        _HANDLERS.reset(token)


def start_all_reduce(tensor: Tensor, op: str = "sum", group: str = "world") -> Tensor:
    """Start to reduce a tensor over the ranks of a group; all ranks make the same calls in the same order.

    Args:
        op: "sum", "mean", "min", "max" or "product"; gradients flow through the first two.

    Returns:
        A promise, to be passed to `wait` once.
    """
    if op not in _OPS:
        raise GraphError(f"no such reduction ({op}); {nearest(op, _OPS)}")
    promise: Tensor = torch.ops.weft.all_reduce.default(tensor, op, group)
    return promise


def wait(promise: Tensor) -> Tensor:
    """Wait for an all-reduce that was started, and return its result."""
    result: Tensor = torch.ops.weft.wait.default(promise)
    return result


def all_reduce(tensor: Tensor, op: str = "sum", group: str = "world") -> Tensor:
    """Reduce a tensor over the ranks of a group, as `start_all_reduce` and then `wait`.

    >>> def alone(tensor, op):
    ...     return lambda: None
    >>> with use_collectives(alone):
    ...     all_reduce(torch.ones(2))
    tensor([1., 1.])
    """
    return wait(start_all_reduce(tensor, op, group))


def _start(tensor: Tensor, op: str, group: str) -> Tensor:
    handlers = _HANDLERS.get()
    if group not in handlers:
        raise GraphError(f"no ranks to talk to (group: {group}); run it inside use_collectives")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    promise = _promise(tensor)
    _PENDING[promise.untyped_storage().data_ptr()] = _Pending(promise, result, handlers[group](result, op))
    return promise


def _wait(promise: Tensor) -> Tensor:
    pending = _PENDING.pop(promise.untyped_storage().data_ptr(), None)
    if pending is None:
        raise GraphError("wait for what was not started, or has been waited for")
    pending.wait()
    return pending.result


def _promise(tensor: Tensor) -> Tensor:
    """One number, shown in the shape of the result."""
    nothing = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return tensor.new_full((), nothing).expand(tensor.shape)


def _result_like(promise: Tensor) -> Tensor:
    return promise.new_empty(promise.shape)


def _keep_settings(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.settings = inputs[1:]


def _backward_of_start(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Every rank's result depends on every rank's tensor: their gradients are reduced as the tensors were."""
    op, group = ctx.settings
    if op not in ("sum", "mean"):
        raise NotImplementedError(f"no gradient of this reduction ({op}); use sum or mean")
    return all_reduce(gradient, op, group), None, None


def _backward_of_wait(_ctx: Any, gradient: Tensor) -> Tensor:
    return gradient


_LIBRARY.define("all_reduce(Tensor tensor, str op, str group) -> Tensor")
_LIBRARY.define("wait(Tensor promise) -> Tensor")
_LIBRARY.impl("all_reduce", _start, "CompositeExplicitAutograd")
_LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")
torch.library.register_fake("weft::all_reduce", lambda tensor, op, group: _promise(tensor), lib=_LIBRARY)
torch.library.register_fake("weft::wait", _result_like, lib=_LIBRARY)
torch.library.register_autograd("weft::all_reduce", _backward_of_start, setup_context=_keep_settings, lib=_LIBRARY)
torch.library.register_autograd("weft::wait", _backward_of_wait, lib=_LIBRARY)
