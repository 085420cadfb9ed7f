"""Which samples of a batch each rank takes."""

from torch import Tensor

from weft.errors import UsageError

__all__ = ["share", "span"]


def share(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Consecutive parts whose sizes differ by at most one: no overlap, no loss; empty where ranks outnumber samples.

    >>> import torch
    >>> [share(torch.arange(5), rank, 3).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    return indices[span(len(indices), rank, world_size)]


def span(length: int, rank: int, world_size: int) -> slice:
    """The part of so many things that `share` gives to a rank.

    >>> [span(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"no such rank (rank: {rank}, world_size: {world_size}); ranks count from 0")
    short, longer = divmod(length, world_size)
    first = rank * short + min(rank, longer)
    return slice(first, first + short + (rank < longer))
