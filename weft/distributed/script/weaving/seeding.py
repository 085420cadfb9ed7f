"""Random numbers of ranks: those of the first replica have the ones of one process, every other replica its own."""

import random
import sys

import torch

from weft.distributed.place import LaunchedPlace
from weft.distributed.script.world.world import World
from weft.training.build import derive_seed

__all__ = ["reseed"]


def reseed(world: World) -> None:
    """Give ranks of other replicas random streams of their own, from rank 0's seed: dropout would draw the same masks
    for different samples. A collective call."""
    seed = torch.tensor([torch.initial_seed() % 2**62])
    world.group.broadcast(seed)
    if world.mesh.replica == 0:
        return
    own = derive_seed(int(seed), f"rank/{world.mesh.replica}")
    torch.manual_seed(own)
    if isinstance(world.place, LaunchedPlace):  # virtual ranks share these with all others
        random.seed(own)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(own % 2**32)
