"""Two groups of the same ranks as one: the first carries tensors of the CPU, the second those of an accelerator."""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.staged import is_on_cpu

__all__ = ["TwoSidedGroup"]


@final
class TwoSidedGroup(AbstractGroup):
    """A call goes to the side where its tensors are. Ranks start the calls of each side in the same order, which
    follows from starting all calls in the same order.

    Args:
        host: carries tensors of the CPU: counts, decisions, random states; and barriers.
        device: carries those of the accelerator; gives out memory.
    """

    def __init__(self, host: AbstractGroup, device: AbstractGroup) -> None:
        super().__init__(host.rank, host.size, clock=host.clock, generation=host.generation)
        self._host = host
        self._device = device

    def start(self, call: Call) -> AbstractWork:
        return (self._host if is_on_cpu(call) else self._device).start(call)

    def run(self, call: Call) -> None:
        (self._host if is_on_cpu(call) else self._device).run(call)

    def split(self, colour: int, key: int) -> "TwoSidedGroup":
        return TwoSidedGroup(self._host.split(colour, key), self._device.split(colour, key))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._device.empty(shape, dtype)

    def close(self) -> None:
        self._device.close()
        self._host.close()
