"""This rank's part of the batch that was handed out last: written by loaders and `weft.share`, read by steps."""

import math
from collections.abc import Callable
from typing import Any, final

import torch

from weft.distributed.script.world import World
from weft.errors import UsageError

__all__ = ["BatchShare"]


@final
class BatchShare:
    """Part of a batch, of one `weave` call.

    Args:
        weight: from a batch to how many items (tokens) its loss is a mean over; samples count where there is none.
    """

    def __init__(self, world: World, weight: Callable[[Any], Any] | None = None) -> None:
        self._world = world
        self._weigh = weight
        own, whole = world.part or (1, world.num_ranks)  # data may have been shared before the model was woven
        self.weight = own / whole
        """Of all ranks they sum to 1; 0 where the rank was given a sample that stands in for none."""
        self.num_batches = 0
        """Handed out to this rank so far."""

    def hand_out(self, batch: Any, own: int, whole: int) -> None:
        """Note a batch, of which this rank has so many samples of all; a collective call where batches are weighed."""
        self.num_batches += 1
        self.weight = self._weighed(batch, own) if self._weigh else own / whole if whole else 0.0

    def _weighed(self, batch: Any, own: int) -> float:
        number = float(self._weigh(batch)) if self._weigh and own else 0.0
        if not 0 <= number < math.inf:
            raise UsageError(f"weight of a batch is not a number from 0 up (weight: {number}); count its items")
        group = self._world.group
        numbers = torch.empty(group.size, dtype=torch.float64)
        with self._world.waiting("weight of a batch", group):
            group.all_gather(numbers, torch.tensor([number], dtype=torch.float64))
        total = math.fsum(numbers.tolist())
        return number / total if total else 0.0
