"""A rank's part of a batch."""

from collections.abc import Callable
from typing import Any, final

from weft.distributed.script.world import World

__all__ = ["BatchShare"]


@final
class BatchShare:
    """This rank's part of the batch that was handed out last; the weights of all ranks sum to 1."""

    def __init__(self, world: World, weight: Callable[[Any], float] | None = None) -> None:
        self.weight = 1.0 / world.num_ranks
