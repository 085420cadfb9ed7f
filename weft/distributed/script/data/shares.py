"""Batches handed out: which part of each is this rank's, for gradients to be weighed by."""

import math
from typing import Any

import torch

from weft.distributed.script.data.batch_share import BatchShare, Weigh
from weft.distributed.script.world.world import World
from weft.errors import UsageError

__all__ = ["hand_out", "make_share"]


def make_share(world: World, weigh: Weigh | None = None) -> BatchShare:
    """Of models that are about to be woven; data may have been shared before."""
    share = BatchShare(world.mesh.num_replicas, weigh)
    if world.part is not None:
        own, whole = world.part
        share.weight = own / whole
    return share


def hand_out(world: World, share: BatchShare, batch: Any, own: int, whole: int) -> None:
    """Note a batch of which this rank has so many samples of all; a collective call where batches are weighed."""
    share.num_batches += 1
    if world.dealer is not None:
        world.dealer.start(own)
    share.weight = _weighed(world, share.weigh, batch, own) if share.weigh else own / whole if whole else 0.0


def _weighed(world: World, weigh: Weigh, batch: Any, own: int) -> float:
    number = float(weigh(batch)) if own else 0.0
    if not 0 <= number < math.inf:
        raise UsageError(f"weight of a batch is not a number from 0 up (weight: {number}); count its items")
    numbers = torch.empty(world.replicas.size, dtype=torch.float64)
    with world.waiting("weight of a batch", world.replicas):
        world.replicas.all_gather(numbers, torch.tensor([number], dtype=torch.float64))
    total = math.fsum(numbers.tolist())
    return number / total if total else 0.0
