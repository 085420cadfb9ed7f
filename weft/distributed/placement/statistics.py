"""Running statistics that ranks gathered apart, brought together."""

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce, Broadcast
from weft.distributed.group.group import AbstractGroup

__all__ = ["average_statistics"]


@torch.no_grad()
def average_statistics(group: AbstractGroup, buffers: Iterable[Tensor]) -> None:
    """Buffers become their mean over ranks, in place; counters, which are whole numbers, become rank 0's."""
    works = [
        group.start(AllReduce(buffer, "mean") if buffer.is_floating_point() else Broadcast(buffer))
        for buffer in buffers
    ]
    for work in works:
        work.wait()
