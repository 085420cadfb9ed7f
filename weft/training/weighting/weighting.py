"""How much a rank's samples count, where it must be known before backward and not after it.

    data parallel     g0 -- w0*g0 --.                         each rank multiplies its own gradients at the end
                      g1 -- w1*g1 --+--> w0*g0 + w1*g1

    experts           rank 0's tokens --.                     a gradient is made of the samples of several ranks, and
                      rank 1's tokens --+--> expert --> g     nobody can tell them apart any more: each rank multiplies
                                                              what goes back from its outputs by its weight

The weights of all ranks sum to 1, as the loop counts them; those of the micro-batches of a rank do so too.

A layer that adds the gradient of a loss of its own (the balance of experts) asks for the weight of what it computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

__all__ = ["Weighting", "use_weight_of_loss", "weight_of_loss"]

_weight_of_loss: ContextVar[float] = ContextVar("weight of the loss", default=1.0)


def weight_of_loss() -> float:
    """With which the loss of the present forward counts in its backward: of a micro-batch in a pipeline, its share."""
    return _weight_of_loss.get()


@contextmanager
def use_weight_of_loss(weight: float) -> Iterator[None]:
    """For whoever multiplies the gradient of a loss, while the forward runs that leads to it."""
    token = _weight_of_loss.set(weight)
    try:
        yield
    finally:
        _weight_of_loss.reset(token)


@final
class Weighting:
    """The weight of what this rank computes next: that of its replica in the global batch, times that of a micro-batch
    in its share. Whoever knows them writes them before a forward."""

    def __init__(self) -> None:
        self.replica = 1.0
        self.piece = 1.0
        self.averages = False
        """Gradients are not added up over the ranks that hold the same part of a parameter, but averaged, as in a
        script: those of parts that each of N ranks has its own of must be an N-th of what they are."""

    @property
    def value(self) -> float:
        return self.replica * self.piece
