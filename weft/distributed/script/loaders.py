"""Loaders under many ranks: rank 0 draws the batches of an epoch, every rank gets its share of each."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.epochs import AbstractEpochs
from weft.distributed.script.world import World
from weft.errors import UsageError
from weft.training.sampling import share

__all__ = ["TrainingLoader", "check_loader"]


def check_loader(loader: object) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(f"loader is no DataLoader ({type(loader).__name__}); give weave one, or None")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise UsageError("loader has no batches of indices to share (an iterable data set); give it a map-style one")
    try:
        len(loader)
    except TypeError:
        raise UsageError(
            "loader has no length, and rank 0 draws the batches of a whole epoch; give its sampler a __len__"
        ) from None


class TrainingLoader:
    """The user's loader, with rank 0 drawing each epoch's batches and every rank getting its share of each.

    A rank for which a short last batch has nothing left takes one sample with weight zero, so that every rank makes the
    same number of steps.
    """

    def __init__(self, loader: DataLoader[Any], world: World, epochs: AbstractEpochs) -> None:
        self._batches: Any = loader.batch_sampler
        self._group = world.group
        self._epochs = epochs
        self._weights: deque[float] = deque()
        self._loader = _with_batches(loader, self)
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._weights.clear()
        self._epochs.begin_epoch()
        to_skip = 0
        for batch in self._loader:
            # Workers fetch ahead, so the weight of a batch waits in line until the batch itself is given out.
            self._epochs.share.weight = self._weights.popleft()
            to_skip = to_skip - 1 if to_skip else self._epochs.num_to_skip()
            if not to_skip:
                yield batch
        self._epochs.end_epoch()  # all ranks are here, and an evaluation may follow

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

    def __init__(self, shared: TrainingLoader) -> None:
        self._shared = shared

    def __len__(self) -> int:
        return len(self._shared)

    def __iter__(self) -> Iterator[list[int]]:
        return self._shared.shares()


def _with_batches(loader: DataLoader[Any], shared: TrainingLoader) -> DataLoader[Any]:
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
