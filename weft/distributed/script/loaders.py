"""Loaders under many ranks: rank 0 draws the batches of an epoch, every rank gets its share of each."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.statistics import average_statistics
from weft.distributed.script.events import BatchTaken
from weft.distributed.script.world import find_world
from weft.training.sampling import share

__all__ = ["SharedLoader"]


class SharedLoader:
    """The user's loader, with rank 0 drawing each epoch's batches and every rank getting its share of each.

    A rank for which a short last batch has nothing left takes one sample with weight zero, so that every rank makes the
    same number of steps.
    """

    def __init__(self, loader: DataLoader[Any], group: AbstractGroup, statistics: tuple[Tensor, ...] = ()) -> None:
        self._batches: Any = loader.batch_sampler
        self._group = group
        self._statistics = statistics
        self._weights: deque[float] = deque()
        self._loader = _with_batches(loader, self)
        self.weight = 1.0 / group.size  # of the batch that was given out last
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        for batch in self._loader:
            # Workers fetch ahead, so the weight of a batch waits in line until the batch itself is given out.
            self.weight = self._weights.popleft()
            find_world().supervision.tell(BatchTaken(batch))
            yield batch
        average_statistics(self._group, self._statistics)  # all ranks are here, and an evaluation may follow

    def shares(self) -> Iterator[list[int]]:
        for batch in self._drawn_by_rank_0():
            own = share(batch, self._group.rank, self._group.size)
            self._weights.append(len(own) / len(batch))
            yield own.tolist() if len(own) else batch[:1].tolist()

    def _drawn_by_rank_0(self) -> tuple[Tensor, ...]:
        drawn = [torch.tensor(batch) for batch in self._batches] if self._group.rank == 0 else []
        sizes = _broadcast_whole(self._group, torch.tensor([len(batch) for batch in drawn], dtype=torch.int64))
        indices = _broadcast_whole(self._group, torch.cat(drawn) if drawn else torch.empty(0, dtype=torch.int64))
        return tuple(indices.split(sizes.tolist()))


class _Shares:
    """A batch sampler for a DataLoader: a fresh round of shares for every epoch."""

    def __init__(self, shared: SharedLoader) -> None:
        self._shared = shared

    def __len__(self) -> int:
        return len(self._shared)

    def __iter__(self) -> Iterator[list[int]]:
        return self._shared.shares()


def _with_batches(loader: DataLoader[Any], shared: SharedLoader) -> DataLoader[Any]:
    """The same loader over other batches; a DataLoader does not let its own be changed."""
    return DataLoader(
        loader.dataset,
        batch_sampler=_Shares(shared),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,  # it also draws for the sampler: left out, the order would not be one process's
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )


def _broadcast_whole(group: AbstractGroup, tensor: Tensor) -> Tensor:
    """Rank 0's int64 vector, of a length that the others do not know yet."""
    length = torch.tensor([len(tensor)])
    group.broadcast(length)
    whole = tensor if group.rank == 0 else torch.empty(int(length), dtype=torch.int64)
    group.broadcast(whole)
    return whole
