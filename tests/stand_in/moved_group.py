"""Calls on tensors of the CPU made on the stand-in instead, so that the contract of groups can be kept there."""

from dataclasses import fields
from typing import final

import torch
from torch import Tensor

from tests.stand_in.accelerator import NAME
from weft.distributed.group import AbstractGroup, AbstractWork, Call
from weft.distributed.group.staged import OUTPUT, StagedGroup, map_tensors

__all__ = ["MovedGroup"]


@final
class MovedGroup(AbstractGroup):
    """Wraps a staged group: the tensors of a call are moved to the device before it, and back when it is done."""

    def __init__(self, inner: StagedGroup) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner

    def start(self, call: Call) -> AbstractWork:
        moved: list[tuple[Tensor, Tensor]] = []

        works_in_place = not any(field.name.startswith(OUTPUT) for field in fields(call))

        def move(name: str, tensor: Tensor) -> Tensor:
            there = tensor.detach().to(NAME)
            if works_in_place or name.startswith(OUTPUT):  # what is read may hold what is written, as it was before
                moved.append((tensor, there))
            return there

        return _MovedWork(self._inner.start(map_tensors(call, move)), moved)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> "MovedGroup":
        return MovedGroup(self._inner.split(colour, key))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        made = self._inner.empty(shape, dtype)
        assert made.device.type == NAME and made.shape == shape and made.dtype == dtype
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        self._inner.close()


@final
class _MovedWork(AbstractWork):
    def __init__(self, inner: AbstractWork, moved: list[tuple[Tensor, Tensor]]) -> None:
        self._inner = inner
        self._moved = moved

    def wait(self) -> None:
        self._inner.wait()
        for tensor, there in self._moved:
            tensor.detach().copy_(there)
        self._moved = []

    def is_done(self) -> bool:
        return self._inner.is_done()
