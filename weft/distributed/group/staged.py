"""A group for tensors of any device over one that carries those of the CPU: they travel by way of host memory.

    device      tensor ---copy--->                                    ---copy--> tensor      when the call is waited for
    host                          tensor ---call of the inner group-->

A call is data, so any is staged alike: its tensors are replaced by copies, and what it writes is copied back.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call, Recv, Send
from weft.distributed.group.checks import check_call
from weft.distributed.group.group import AbstractGroup, AbstractWork

__all__ = ["StagedGroup", "is_on_cpu", "map_tensors"]

OUTPUT = "output"
"""Fields of a call that begin with it are written, and the others read; a call that has none works in place."""


def map_tensors(call: Call, change: Callable[[str, Tensor], Tensor]) -> Call:
    """The call with each of its tensors, alone or in a tuple, replaced by `change(field, tensor)`."""
    found: dict[str, Any] = {}
    for field in fields(call):
        value = getattr(call, field.name)
        if isinstance(value, Tensor):
            found[field.name] = change(field.name, value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            found[field.name] = tuple(change(field.name, tensor) for tensor in value)
    return replace(call, **found) if found else call


def is_on_cpu(call: Call) -> bool:
    """Whether all tensors of a call are the CPU's; so it is where there are none."""
    strangers: list[Tensor] = []

    def look(_: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cpu:
            strangers.append(tensor)
        return tensor

    map_tensors(call, look)
    return not strangers


@final
class StagedGroup(AbstractGroup):
    """Wraps any group. Tensors of the CPU are passed on as they are, so that small counts and decisions go no way
    around.

    Args:
        device: where `empty()` makes tensors.
    """

    def __init__(self, inner: AbstractGroup, device: torch.device) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner
        self._device = device

    @property
    def inner(self) -> AbstractGroup:
        """The group that this one wraps."""
        return self._inner

    def start(self, call: Call) -> AbstractWork:
        if is_on_cpu(call):
            return self._inner.start(call)
        check_call(call, self._rank, self._size)
        copies: list[tuple[Tensor, Tensor]] = []  # what is to be written, and the copy that has it in the end
        works_in_place = not any(field.name.startswith(OUTPUT) for field in fields(call))

        def stage(name: str, tensor: Tensor) -> Tensor:
            is_written = works_in_place or name.startswith(OUTPUT)
            is_read = not is_written or (works_in_place and not isinstance(call, Recv))
            if tensor.is_cpu:
                return tensor
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            if is_read:
                copy.copy_(tensor.detach())
            if is_written and not isinstance(call, Send):
                copies.append((tensor, copy))
            return copy

        return _StagedWork(self._inner.start(map_tensors(call, stage)), copies)

    def run(self, call: Call) -> None:
        if is_on_cpu(call):
            self._inner.run(call)
        else:
            self.start(call).wait()

    def split(self, colour: int, key: int) -> "StagedGroup":
        return StagedGroup(self._inner.split(colour, key), self._device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if self._device.type == "cpu":
            return self._inner.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def close(self) -> None:
        self._inner.close()


@final
class _StagedWork(AbstractWork):
    """Copies results back when it is waited for, in the thread that waits: in order with what that computes next."""

    def __init__(self, inner: AbstractWork, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._inner = inner
        self._copies = copies

    def wait(self) -> None:
        self._inner.wait()
        copies, self._copies = self._copies, []
        for tensor, copy in copies:
            tensor.detach().copy_(copy)

    def is_done(self) -> bool:
        return self._inner.is_done()
