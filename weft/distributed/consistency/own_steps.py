"""Steps of a rank that makes its own updates, whatever carries its weights to others: a group, servers, a mailbox."""

import math
from typing import final

from torch import Tensor

from weft.distributed.consistency.scheme import AbstractScheme
from weft.distributed.placement.inside import InsideReplica
from weft.graph import GradientSink
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Update

__all__ = ["OwnSteps"]


@final
class OwnSteps:
    """For each step `begin` and `finish`, as in AbstractReplicas; the scheme moves weights around the update.

    Args:
        inside: the ranks that hold the model together, of which one has the loss; by default this one alone.
    """

    def __init__(self, scheme: AbstractScheme, inside: InsideReplica | None = None) -> None:
        self._scheme = scheme
        self._inside = inside
        self._gradients: dict[str, Tensor | None] = {}
        self._weight = 0.0

    def begin(self, step: int, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self._scheme.begin(step, weight)
        return self._add if self._inside is None else self._inside.begin(self._add)

    def _add(self, name: str, gradient: Tensor | None) -> None:
        self._gradients[name] = gradient
        self._scheme.advance()

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        """The loss of this rank's own share; where it is not finite no update is made, and no weights are moved."""
        if self._inside is not None:
            self._inside.finish(update.parameters)
            loss = self._inside.total(loss)
        own = self.own_loss(loss)
        if not math.isfinite(own):
            return own, update.state
        self._scheme.before_update()
        state = update.apply(self._gradients)
        return own, self._scheme.after_update(state)

    def own_loss(self, loss: float) -> float:
        """The mean over this rank's share, of its part of the batch's loss."""
        return loss / self._weight if self._weight else 0.0
