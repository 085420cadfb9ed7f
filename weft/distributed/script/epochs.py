"""The seam between loaders and weavings: what happens to the models where an epoch begins and ends."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from weft.distributed.script.shares import BatchShare

__all__ = ["AbstractEpochs"]


class AbstractEpochs(ABC):
    """Called by a training loader on every rank."""

    @property
    @abstractmethod
    def share(self) -> BatchShare:
        """This rank's part of the batch that was handed out last."""

    @abstractmethod
    def begin_epoch(self) -> None:
        """Every rank has its own weights again. A collective call."""

    @abstractmethod
    def end_epoch(self) -> None:
        """Running statistics are brought together, and the models hold the consensus of all ranks until an epoch
        begins. A collective call."""

    @abstractmethod
    def num_to_skip(self) -> int:
        """Batches to pass over before the next is handed out: those of rounds that this rank was late for."""

    @abstractmethod
    def use_consensus(self) -> AbstractContextManager[None]:
        """Hold the consensus of all ranks in the models. Entered by all; a rank leaves by itself."""
