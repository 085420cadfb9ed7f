"""Evaluation shared between ranks: each takes a block of the data, and every sample is somebody's once.

    order of one process    | batch 0       | batch 1       | batch 2  |
    two ranks               | rank 0                |  rank 1          |     cut where batches end, and at a rank's end

So what ranks gather afterwards is in the order of one process.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar, final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from weft.distributed.script.data.feeds import has_length, make_feed, remake_loader
from weft.distributed.script.data.loaders import TrainingLoader, check_loader
from weft.distributed.script.data.order import draw_order
from weft.distributed.script.world.world import World, find_world
from weft.training.sampling import span

__all__ = ["EvaluationLoader", "block_of", "evaluation"]

Sample = TypeVar("Sample")


def evaluation(loader: DataLoader[Any] | TrainingLoader) -> Any:
    """A loader for evaluation: the shares of all ranks are the data of `loader`, each sample once.

    Ranks may get unequal numbers of batches, or none: add up in the loop, and call `weft.sum`, `weft.mean(...,
    weight=n)` or `weft.gather` after it. While it is iterated, models hold the weights that all ranks stand for. In one
    process it gives the batches of `loader`.

    Args:
        loader: of any kind; a block of its order is a rank's. A batch sampler's batches stay whole.
            Of iterable data each rank takes its share of every batch.

    Returns:
        An iterable with a length, and with the attributes of `loader`.

    Example:

        num_right = 0
        for x, y in weft.evaluation(test_loader):
            num_right += (model(x).argmax(1) == y).sum()
        accuracy = weft.sum(num_right).item() / len(test_loader.dataset)
    """
    if isinstance(loader, TrainingLoader):
        loader = loader.plain
    check_loader(loader)
    return EvaluationLoader(loader, find_world())


def block_of(batches: Sequence[Sequence[Sample]], rank: int, num_ranks: int) -> list[list[Sample]]:
    """A rank's block of all samples, in batches that end where those of one process do.

    >>> [block_of([[5, 3, 1], [0, 2, 4], [6]], rank, 2) for rank in range(2)]
    [[[5, 3, 1], [0]], [[2, 4], [6]]]
    """
    block = span(sum(len(batch) for batch in batches), rank, num_ranks)
    parts, first = [], 0
    for batch in batches:
        own = batch[max(block.start - first, 0) : max(block.stop - first, 0)]
        first += len(batch)
        if own:
            parts.append(list(own))
    return parts


@final
class EvaluationLoader:
    """One rank's share of a loader's data. Attributes are those of the script's loader."""

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._loader = loader
        self._world = world

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Batches of this rank."""
        mesh, batches = self._world.mesh, self._loader.batch_sampler
        if mesh.num_replicas == 1 or isinstance(self._loader.dataset, IterableDataset):
            return len(self._loader)
        if batches is None or not _is_plain(self._loader):
            return len(range(len(self._loader))[span(len(self._loader), mesh.replica, mesh.num_replicas)])
        size = self._loader.batch_size or 1
        total = len(self._loader.sampler)  # type: ignore[arg-type]  # a sampler that has no length has no end
        if self._loader.drop_last:
            total -= total % size
        own = span(total, mesh.replica, mesh.num_replicas)
        return -(-own.stop // size) - own.start // size if own.stop > own.start else 0

    def __iter__(self) -> Iterator[Any]:
        self._world.settle()
        dataset: Any = self._loader.dataset
        facts = {"samples": len(dataset)} if has_length(dataset) else {}
        with self._world.meeting("weft.evaluation", facts, same_line=False):
            pass
        with ExitStack() as held:
            for weaving in self._world.weavings:
                held.enter_context(weaving.use_consensus())
            yield from self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._world.group.size == 1:
            return iter(self._loader)
        if isinstance(self._loader.dataset, IterableDataset):
            return (fetched.batch for fetched in make_feed(self._loader, self._world).begin() if fetched.own)
        sampler = _OwnBatches(self._loader, self._world)
        if self._loader.batch_sampler is None:
            return iter(remake_loader(self._loader, batch_size=None, sampler=sampler))
        return iter(remake_loader(self._loader, batch_sampler=sampler))


@final
class _OwnBatches:
    """A sampler for a DataLoader: this rank's part of what rank 0 draws, once it is asked for."""

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._loader, self._world = loader, world

    def __iter__(self) -> Iterator[Any]:
        group, mesh, batches = self._world.group, self._world.mesh, self._loader.batch_sampler
        with self._world.waiting("order of an evaluation", group):
            source: Any = ([index] for index in self._loader.sampler) if batches is None else batches
            drawn = draw_order(group, source).batches
        if _is_plain(self._loader):
            yield from block_of(drawn, mesh.replica, mesh.num_replicas)
        else:
            for batch in drawn[span(len(drawn), mesh.replica, mesh.num_replicas)]:
                yield batch[0] if batches is None else batch


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether batches are any samples in a row, and not those that belong together by a sampler of the script's own."""
    return type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
