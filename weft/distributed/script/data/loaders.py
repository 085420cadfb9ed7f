"""The training loader under many ranks: rank 0 draws the batches of an epoch, every rank gets its share of each."""

from collections.abc import Iterator
from typing import Any, final

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from weft.distributed.script.data.cutting import few_of
from weft.distributed.script.data.epochs import AbstractEpochs
from weft.distributed.script.data.feeds import generators_of, has_length, make_feed
from weft.distributed.script.data.shares import hand_out
from weft.distributed.script.observation.events import BatchTaken
from weft.distributed.script.world.world import World
from weft.errors import UsageError

__all__ = ["TrainingLoader", "check_loader"]


def check_loader(loader: Any) -> None:
    """Raise UsageError for what cannot be shared between ranks, in one process as on many."""
    if isinstance(loader, TrainingLoader):
        raise UsageError("loader is woven already; weave it once, with all models that it trains")
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"loader is not a DataLoader (type: {type(loader).__name__}); use loader=None, and weft.share in the loop"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"loader makes its batches in an __iter__ of its own, which ranks that draw for each other would pass by "
            f"(type: {type(loader).__name__}); do it in collate_fn, or use loader=None, and weft.share in the loop"
        )
    batches: Any = loader.batch_sampler
    if any(
        isinstance(sampler, DistributedSampler) for sampler in (loader.sampler, getattr(batches, "sampler", batches))
    ):
        raise UsageError(
            "loader has a DistributedSampler, and would be shared twice; leave it out, and use shuffle=True"
        )


@final
class TrainingLoader:
    """The script's loader, with every rank getting its share of each of its batches. In one process that is all of it.

    A rank for which a short last batch has nothing left takes one sample with weight zero, so that every rank makes the
    same number of steps. So does a rank that is late, with a few samples of each batch whose round the others have
    closed: it catches up, and its script counts as those of the others do. What is not here (`dataset`, `batch_size`,
    `sampler`) is the script's loader's.
    """

    __slots__ = ("_current", "_done", "_epoch", "_epochs", "_feed", "_generators", "_loader", "_resumed", "_world")

    def __init__(self, loader: DataLoader[Any], world: World, epochs: AbstractEpochs) -> None:
        self._loader = loader
        self._world = world
        self._epochs = epochs
        self._feed = make_feed(loader, world)
        self._generators = generators_of(loader)[1:]
        self._epoch = 0
        self._done = 0  # batches of this epoch that were handed out
        self._current: object | None = None  # the iteration that is under way
        self._resumed: dict[str, Any] | None = None

    @property
    def plain(self) -> DataLoader[Any]:
        """The script's own."""
        return self._loader

    def __getattr__(self, name: str) -> Any:
        if name in TrainingLoader.__slots__:  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._world.settle()
        with self._world.meeting("beginning of an epoch", self._facts(), same_line=False):
            pass
        self._epochs.begin_epoch()
        self._current = current = object()
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._done, batches = 0, self._feed.begin()
        else:
            batches = self._feed.resume(resumed)
        share, supervision = self._epochs.share, self._world.supervision
        try:
            for fetched in batches:
                batch, own, whole, _ = fetched
                if self._epochs.is_late():
                    batch, own = few_of(batch, own), 0
                hand_out(self._world, share, batch, own, whole)
                self._done += 1
                if supervision.observers:
                    supervision.tell(BatchTaken(batch))
                yield batch
        except GeneratorExit:
            if self._current is current:  # and not a later one, which began before this was closed
                self._leave()
                self._world.owe_end(self._epochs)
            raise
        self._leave()
        self._epochs.end_epoch()  # all ranks are here, and an evaluation may follow

    def _leave(self) -> None:
        self._epoch, self._done, self._current = self._epoch + 1, 0, None

    def _facts(self) -> dict[str, object]:
        dataset = self._loader.dataset
        facts: dict[str, object] = {"samples": len(dataset)} if has_length(dataset) else {}  # type: ignore[arg-type]
        if self._resumed is not None:
            facts["batches done"] = self._done
        return facts

    def state_dict(self) -> dict[str, Any]:
        """The position: batches that were handed out, and what is left of the epoch. Plain values and tensors.

        It does for any number of ranks. Only data that is read from the beginning gives the same batches again: a
        stream must be one that repeats itself.
        """
        rest = self._resumed if self._current is None else self._feed.rest(self._done)
        generators = [generator.get_state() for generator in self._generators]
        return {"epoch": self._epoch, "batches": self._done, "rest": rest, "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position when the loader is iterated next. Nothing is sent, and nothing drawn then."""
        if len(state["generators"]) != len(self._generators):
            numbers = f"saved: {len(state['generators'])}, here: {len(self._generators)}"
            raise UsageError(
                f"loader draws from other generators than the saved one ({numbers}); build it the same way"
            )
        self._epoch, self._done, self._resumed = state["epoch"], state["batches"], state["rest"]
        for generator, its in zip(self._generators, state["generators"], strict=True):
            generator.set_state(its)
