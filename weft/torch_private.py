"""Private names of PyTorch, kept in one file because the pinned version is all that vouches for them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import _FlopCounterMode

__all__ = [
    "Annotate",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "below_autograd",
    "fake_mode",
    "functionalise",
    "leave_compiler_alone",
    "schema_of",
    "shares_memory",
    "trace",
    "use_determinism",
]


@contextmanager
def use_determinism() -> Iterator[None]:
    """Same seed, same bits: refuse operators that cannot promise it, without paying for memory that is filled first.

    The public switch also imports torch's compiler, to configure it; that takes seconds and has no use here.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_algorithms(True)
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0])
        torch._C._set_deterministic_fill_uninitialized_memory(before[1])


def leave_compiler_alone(mode: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    """A class decorator. A dispatch mode imports torch's compiler when it first runs, for seconds, only to tell it to
    look away; this one is never traced."""
    dispatch: Any = mode.__dict__["__torch_dispatch__"]
    raw = getattr(dispatch, "__wrapped__", None)
    if raw is not None:
        raw.__dynamo_disable = raw  # where torch keeps what it would have made of it
    return mode


leave_compiler_alone(_FlopCounterMode)


def shares_memory(tensor: Tensor) -> bool:
    """Whether anything else holds the tensor's memory: another tensor, or a node of autograd."""
    if tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    # Two holders are ours: the tensor, and the storage object that was just made to ask.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def fake_mode() -> FakeTensorMode:
    """Where tensors have shapes and no values; `from_tensor` lets one in, a tensor that came another way is refused."""
    return FakeTensorMode(allow_non_fake_inputs=False)


Annotate = Callable[[fx.Node, bool], None]
"""Told of every new node, and whether autograd's backward called for it, while the call is on the stack."""


def trace(
    function: Callable[..., Any], annotate: Annotate, fakes: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """The ATen operators that a function calls, its gradients' among them."""

    def watched(*arguments: Tensor) -> Any:
        proxies = get_proxy_mode()
        assert proxies is not None
        with _Watch(proxies.tracer.graph, annotate):
            return function(*arguments)

    # With several threads, backward would be traced on another one, where the modes are not active.
    with mode, torch.autograd.set_multithreading_enabled(False):
        return make_fx(watched)(*fakes)


def functionalise(
    function: Callable[..., Any], annotate: Annotate, fakes: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """The same operators without writes in place; a write to an argument is a `copy_` at the end. No gradients."""
    return trace(functionalize(function, remove="mutations"), annotate, fakes, mode)


@leave_compiler_alone
class _Watch(TorchDispatchMode):
    """Tells of each node that a call adds to the graph."""

    def __init__(self, graph: fx.Graph, annotate: Annotate) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._annotate = annotate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        last = self._graph._root.prev
        result = func(*args, **(kwargs or {}))
        is_backward = torch._C._current_autograd_node() is not None
        while last.next is not self._graph._root:
            last = last.next
            self._annotate(last, is_backward)
        return result


def below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator called in grad mode and yet unseen by autograd: some keep what their backward needs only then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return call


def schema_of(target: Any) -> Any:
    """What an operator takes, returns and writes to; None for what is no operator."""
    return target._schema if isinstance(target, torch._ops.OpOverload) else None
