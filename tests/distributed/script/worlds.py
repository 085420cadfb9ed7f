"""Virtual ranks that are each a world, and models that a loader trains, for tests."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

from tests.distributed.virtual_plan import FREE
from weft.distributed.group import AbstractGroup
from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.data.epochs import AbstractEpochs
from weft.distributed.script.world.world import World, find_world, use_world
from weft.distributed.virtual import run_virtual
from weft.simulation.place import VirtualPlace

__all__ = ["Noted", "on_worlds"]


def on_worlds(script: Callable[[int], Any], size: int) -> list[Any]:
    """Call `script(rank)` on so many virtual ranks."""
    shared: dict[str, Any] = {}

    def program(group: AbstractGroup) -> Any:
        with use_world(World(VirtualPlace(group, (), FREE, shared))):
            return script(group.rank)

    return list(run_virtual(program, size).results)


@final
class Noted(AbstractEpochs):
    """Models that note what a loader tells them."""

    def __init__(self, weight: Callable[[Any], Any] | None = None, late: tuple[bool, ...] = ()) -> None:
        self.notes: list[str] = []
        self._share = BatchShare(find_world().num_ranks, weight)
        self._late = iter(late)
        find_world().weavings.append(self)

    @property
    def share(self) -> BatchShare:
        return self._share

    def begin_epoch(self) -> None:
        find_world().group.barrier()
        self.notes.append("begin")

    def end_epoch(self) -> None:
        find_world().group.barrier()
        self.notes.append("end")

    def is_late(self) -> bool:
        return next(self._late, False)

    @contextmanager
    def use_consensus(self) -> Iterator[None]:
        find_world().group.barrier()
        self.notes.append("enter")
        try:
            yield
        finally:
            self.notes.append("leave")
