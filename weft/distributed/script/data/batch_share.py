"""This rank's part of the batch that was handed out last: written by loaders and `weft.share`, read by steps."""

from collections.abc import Callable
from typing import Any, final

__all__ = ["BatchShare", "Weigh"]

Weigh = Callable[[Any], Any]
"""From a batch to how many items (samples, tokens) its loss is a mean over: a number, or a tensor that holds one."""


@final
class BatchShare:
    """Part of a batch, of one `weave` call.

    Args:
        weigh: how many items the loss of a batch is a mean over; samples count where there is none.
    """

    def __init__(self, num_ranks: int, weigh: Weigh | None = None) -> None:
        self.weigh = weigh
        self.weight = 1.0 / num_ranks
        """Of all ranks they sum to 1; 0 where the rank was given a sample that stands in for none."""
        self.num_batches = 0
        """Handed out to this rank so far."""
