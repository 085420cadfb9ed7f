"""The seam between loaders and what was woven with them: what happens where an epoch begins and ends."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from weft.distributed.script.data.batch_share import BatchShare

__all__ = ["AbstractEpochs"]


class AbstractEpochs(ABC):
    """Models that train on the batches of a loader, as the loader sees them. All ranks call everything together, but
    for `is_late`."""

    @property
    @abstractmethod
    def share(self) -> BatchShare:
        """Where the loader writes which part of a batch it has handed out."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Every rank has its own weights again, where the last epoch's end had brought them together."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Running statistics are averaged, and models hold what all ranks stand for until the next epoch begins."""

    @abstractmethod
    def is_late(self) -> bool:
        """Whether the others have closed the round of the next step without this rank: of its batch a few samples do.
        Asked before each batch is handed out. Not a collective call."""

    @abstractmethod
    def use_consensus(self) -> AbstractContextManager[None]:
        """Models hold what all ranks stand for, while it is held; leaving it sends nothing."""
