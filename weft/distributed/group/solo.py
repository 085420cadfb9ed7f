"""The group of one rank: no transport, every call done when it is started."""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import AbstractClock, RealClock
from weft.distributed.group.group import AbstractGroup, AbstractWork, DoneWork

__all__ = ["SoloGroup"]


@final
class SoloGroup(AbstractGroup):
    """One rank by itself. Reductions leave their tensor as it is; gathers copy.

    >>> group = SoloGroup()
    >>> total = torch.tensor([1.0, 2.0])
    >>> group.all_reduce(total)
    >>> total
    tensor([1., 2.])
    """

    def __init__(self, *, clock: AbstractClock | None = None, generation: int = 0) -> None:
        super().__init__(0, 1, clock=clock or RealClock(), generation=generation)

    def start(self, call: Call) -> AbstractWork:
        check_call(call, 0, 1)
        match call:
            case calls.AllGather() | calls.AllToAll() | calls.ReduceScatter():
                call.output.detach().copy_(call.tensor.detach().reshape(call.output.shape))
            case calls.NeighbourAllReduce():
                call.tensor.detach().mul_(call.weights[0][0])
            case _:
                pass
        return DoneWork()

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        return SoloGroup(clock=self._clock, generation=self._generation)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        pass
