"""The policy seam: when a shard updates, and when a rank may go on. Knows ranks, steps and time; no tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from weft.distributed.consistency.server.decisions import Decision, Push

__all__ = ["NEVER", "AbstractPolicy"]

NEVER = math.inf


class AbstractPolicy(ABC):
    """Told of what happens, answers what to do about it, in order. The life of a rank:

        arrive     it wants weights                                -> Release, now or later
        push       it gives the gradient of the step of its release, and wants weights again
        leave      it died, or has done its part

    All ranks are taken to be there from the beginning: nobody starts without the others.
    """

    @abstractmethod
    def arrive(self, rank: int, step: int | None, now: float) -> Sequence[Decision]:
        """A rank asks for weights: at the start, after it or the shard was lost, or of a later moment.

        Args:
            step: the earliest that it may take; None for a rank that knows nothing yet.
        """

    @abstractmethod
    def push(self, rank: int, step: int, now: float, others: Sequence[Push] = ()) -> Sequence[Decision]:
        """A gradient is here. Each comes once, and those of a rank in the order of their steps.

        Args:
            others: the pushes that a host server has joined with it.
        """

    @abstractmethod
    def leave(self, rank: int, now: float) -> Sequence[Decision]: ...

    @abstractmethod
    def stop(self) -> Sequence[Decision]:
        """Every rank is told to stop: those that wait, now, the others when they ask."""

    @abstractmethod
    def alarm(self) -> float:
        """The moment at which `ring` is to be called; NEVER if at none."""

    @abstractmethod
    def ring(self, now: float) -> Sequence[Decision]: ...
