"""Two groups of the same ranks as one: a transport of an accelerator carries its collectives, another all the rest."""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllGather, AllReduce, AllToAll, Broadcast, Call, Reduce, ReduceScatter
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.staged import StagedGroup, is_on_cpu

__all__ = ["TwoSidedGroup"]

COLLECTIVES = AllGather | AllReduce | AllToAll | Broadcast | Reduce | ReduceScatter
"""The calls that NCCL makes in one piece. Messages stay outside: it carries them out in the order in which they were
started, so that two ranks which both send before they receive would wait for each other."""


@final
class TwoSidedGroup(AbstractGroup):
    """All ranks start all calls in the same order, and so those of each side.

    Args:
        host: carries tensors of the CPU (counts, decisions, random states), messages and barriers.
        device: carries collectives on tensors of the accelerator.
    """

    def __init__(self, host: StagedGroup, device: AbstractGroup) -> None:
        super().__init__(host.rank, host.size, clock=host.clock, generation=host.generation)
        self._host = host
        self._device = device

    def start(self, call: Call) -> AbstractWork:
        return self._side_of(call).start(call)

    def run(self, call: Call) -> None:
        self._side_of(call).run(call)

    def split(self, colour: int, key: int) -> "TwoSidedGroup":
        return TwoSidedGroup(self._host.split(colour, key), self._device.split(colour, key))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._device.empty(shape, dtype)

    def close(self) -> None:
        self._device.close()
        self._host.close()

    def _side_of(self, call: Call) -> AbstractGroup:
        return self._device if isinstance(call, COLLECTIVES) and not is_on_cpu(call) else self._host
