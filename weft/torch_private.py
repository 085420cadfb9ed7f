"""Private names of PyTorch, kept in one file because the pinned version is all that vouches for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import _FlopCounterMode

__all__ = ["leave_compiler_alone", "shares_memory", "use_determinism"]


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
