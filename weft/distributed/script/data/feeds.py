"""Where a loader's batches come from, seen from one rank of several.

    kind of loader                    drawn by        a rank fetches
    map-style data, batches           rank 0          its share of the indices of every batch
    map-style data, batch_size=None   rank 0          every item, which is a batch, and cuts its share
    iterable data                     the stream      every batch, and cuts its share before it is collated

Loader workers, collate_fn, pin_memory and all else stay as the script has them.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from weft.distributed.script.data.cutting import cut, digest_of, num_samples, part_of
from weft.distributed.script.data.order import Order, draw_one_by_one, draw_order
from weft.distributed.script.world.world import World
from weft.errors import UsageError

__all__ = ["AbstractFeed", "Fetched", "has_length", "make_feed", "remake_loader"]


class Fetched(NamedTuple):
    """A rank's part of a batch, how many samples it has (0 where one stands in for none), and how many all have."""

    batch: Any
    own: int
    whole: int
    digest: int = 0


class AbstractFeed(ABC):
    """The batches of one loader, epoch after epoch."""

    @abstractmethod
    def begin(self) -> Iterator[Fetched]:
        """Those of an epoch. Called by all ranks; batches are fetched ahead where there are workers."""

    @abstractmethod
    def resume(self, state: dict[str, Any]) -> Iterator[Fetched]:
        """Those that were left of an epoch. Draws nothing from any generator."""

    @abstractmethod
    def rest(self, num_done: int) -> dict[str, Any]:
        """The state that `resume` needs after so many batches of the epoch that was begun last."""


def make_feed(loader: DataLoader[Any], world: World) -> AbstractFeed:
    """The feed for a loader of any kind."""
    if isinstance(loader.dataset, IterableDataset):
        return StreamFeed(loader, world)
    return IndexFeed(loader, world)


def remake_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """The same loader with something changed; a DataLoader does not let its batches be changed."""
    same = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,  # it also draws for the sampler: left out, the order would not be one process's
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return DataLoader(loader.dataset, **{**same, **changes})


def has_length(thing: Any) -> bool:
    try:
        len(thing)
    except (TypeError, NotImplementedError):
        return False
    return True


@final
class IndexFeed(AbstractFeed):
    """Of map-style data. Rank 0 draws a whole epoch when it begins, or batch after batch where a sampler has no
    length."""

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._has_batches = loader.batch_sampler is not None
        self._round = _Round(loader.batch_sampler if self._has_batches else _Ones(loader.sampler), world)
        if self._has_batches:
            self._loader = remake_loader(loader, batch_sampler=self._round)
        else:
            collate = _CutItem(loader.collate_fn, world.mesh.replica, world.mesh.num_replicas)
            self._loader = remake_loader(loader, batch_size=None, sampler=_First(self._round), collate_fn=collate)
        self._generators = generators_of(loader)
        self._num_before = 0  # batches of the epoch that came before those of its order, if it was resumed

    def begin(self) -> Iterator[Fetched]:
        self._num_before = 0
        self._round.shares = shares = deque[tuple[int, int]]()
        # iter() first draws a seed for workers, then the sampler draws when the first batch is asked for, as in one
        # process.
        return self._fetched(iter(self._loader), shares)

    def resume(self, state: dict[str, Any]) -> Iterator[Fetched]:
        self._round.resumed = Order.from_state(state)
        before = [generator.get_state() for generator in self._generators]
        batches = self.begin()
        self._num_before = state["num_before"]
        for generator, its in zip(self._generators, before, strict=True):
            generator.set_state(its)
        return batches

    def rest(self, num_done: int) -> dict[str, Any]:
        if self._round.order is None:
            raise UsageError("loader has no length, so its position cannot be kept; give its sampler a __len__")
        return {**self._round.order.to_state(num_done - self._num_before), "num_before": num_done}

    def _fetched(self, batches: Iterator[Any], shares: deque[tuple[int, int]]) -> Iterator[Fetched]:
        for batch in batches:
            # Workers fetch ahead, so the share of a batch waits in line until the batch itself is given out.
            part = shares.popleft()
            yield Fetched(batch, *part) if self._has_batches else batch


@final
class _Round:
    """A batch sampler for a DataLoader: this rank's part of what rank 0 draws, anew in every epoch.

    It knows nothing of the loader: in a ring of references, workers that persist would outlive all use of them.
    """

    def __init__(self, sampler: Any, world: World) -> None:
        self._sampler = sampler
        self._world = world
        self.order: Order | None = None  # of the epoch that was begun last, if it is known as a whole
        self.resumed: Order | None = None
        self.shares: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        mesh, shares = self._world.mesh, self.shares
        rank, size = mesh.replica, mesh.num_replicas
        for batch in self._whole_batches():
            whole = len(batch)
            speeds = self._world.speeds
            own, count = part_of(whole, rank, size, speeds) if size > 1 else (slice(None), whole)  # quick: each step's
            shares.append((count, whole))
            yield batch[own]

    def _whole_batches(self) -> Iterator[list[Any]]:
        self.order, self.resumed = self.resumed, None
        group = self._world.group
        waiting = self._world.waiting("order of batches", group)
        if self.order is None and has_length(self._sampler):
            with waiting:
                self.order = draw_order(group, self._sampler)
        return iter(self.order.batches) if self.order is not None else draw_one_by_one(group, self._sampler, waiting)


@final
class StreamFeed(AbstractFeed):
    """Of iterable data: every rank reads the whole stream, and takes its share of every batch.

    Loader workers are seeded alike on all ranks, so that streams may shuffle in them. Ranks compare their streams now
    and then: one that draws from each rank's own generator would lose some samples and repeat others.
    """

    def __init__(self, loader: DataLoader[Any], world: World) -> None:
        self._world = world
        self._source = loader.generator or torch.default_generator
        self._begun_with = self._source.get_state()
        group = world.group
        self._own = self._source if group.rank == 0 else torch.Generator()
        make = _CutItem if loader.batch_size is None else _CutSamples
        self._loader = remake_loader(
            loader,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            collate_fn=make(loader.collate_fn, world.mesh.replica, world.mesh.num_replicas),
            generator=loader.generator if group.rank == 0 else self._own,
        )

    def begin(self) -> Iterator[Fetched]:
        group = self._world.group
        self._begun_with = self._source.get_state()
        if group.size > 1:
            with self._world.waiting("seed of a stream", group):
                group.broadcast(self._begun_with)
            if group.rank > 0:
                self._own.set_state(self._begun_with)
        return self._compared(iter(self._loader))

    def resume(self, state: dict[str, Any]) -> Iterator[Fetched]:
        """Read past what was handed out before."""
        before = self._source.get_state()
        self._source.set_state(state["generator"])
        batches = self.begin()
        for _ in range(state["batches"]):
            next(batches, None)
        self._source.set_state(before)
        return batches

    def rest(self, num_done: int) -> dict[str, Any]:
        return {"batches": num_done, "generator": self._begun_with.clone()}

    def _compared(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Batches 1, 2, 4, 8, ... are compared."""
        group = self._world.group
        for number, fetched in enumerate(batches, start=1):
            if group.size > 1 and number & (number - 1) == 0:
                digests = torch.empty(group.size, dtype=torch.int64)
                with self._world.waiting("next batch of a stream", group):
                    group.all_gather(digests, torch.tensor([fetched.digest]))
                _check_same_stream(number, digests.tolist())
            yield fetched


def _check_same_stream(number: int, digests: list[int]) -> None:
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise UsageError(
            f"ranks read different streams (batch: {number}, ranks: 0 and {other}); give the stream a generator of its "
            "own with a fixed seed, or num_workers=1, and let it not look at the rank"
        )


@final
class _Ones:
    """A sampler's indices as batches of one."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return ([index] for index in self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


@final
class _First:
    """The other way round."""

    def __init__(self, batches: Iterable[list[Any]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self._batches)


@final
class _CutSamples:
    """Collates this rank's samples of a batch, in a worker process too."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, num_ranks: int) -> None:
        self._collate, self._rank, self._num_ranks = collate, rank, num_ranks

    def __call__(self, samples: list[Any]) -> Fetched:
        own, count = part_of(len(samples), self._rank, self._num_ranks)
        digest = digest_of(samples[0]) if self._num_ranks > 1 else 0
        return Fetched(self._collate(samples[own]), count, len(samples), digest)


@final
class _CutItem:
    """Cuts a batch that the data set itself has made."""

    def __init__(self, convert: Callable[[Any], Any], rank: int, num_ranks: int) -> None:
        self._convert, self._rank, self._num_ranks = convert, rank, num_ranks

    def __call__(self, item: Any) -> Fetched:
        batch = self._convert(item)
        if self._num_ranks == 1:
            return Fetched(batch, 1, 1)
        whole = num_samples(batch)
        own, count = part_of(whole, self._rank, self._num_ranks)
        return Fetched(cut(batch, own), count, whole, digest_of(batch))


def generators_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Those that the batches of a loader are drawn with, the process's own first."""
    batches: Any = loader.batch_sampler
    holders = [loader, batches, loader.sampler, getattr(batches, "sampler", None)]
    found = [torch.default_generator, *(getattr(holder, "generator", None) for holder in holders)]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())
