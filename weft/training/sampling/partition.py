"""Which samples of a batch each rank takes."""

from torch import Tensor

from weft.errors import UsageError

__all__ = ["share"]


def share(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Consecutive parts whose sizes differ by at most one: no overlap, no loss; empty where ranks outnumber samples.

    >>> import torch
    >>> [share(torch.arange(5), rank, 3).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    if not 0 <= rank < world_size:
        raise UsageError(f"no such rank (rank: {rank}, world_size: {world_size}); ranks count from 0")
    short, longer = divmod(len(indices), world_size)
    first = rank * short + min(rank, longer)
    return indices[first : first + short + (rank < longer)]
