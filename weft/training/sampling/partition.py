"""Which samples of a batch each rank takes: as many as every other, or by its speed."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from weft.errors import UsageError

__all__ = ["deal", "share", "span", "span_by_speed"]


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


def deal(length: int, speeds: Sequence[int]) -> list[int]:
    """So many things dealt in proportion to speeds: none gets less than one, as long as there are enough for all.

    What is left over goes to those who lack most, the first where several lack the same: all ranks deal alike.

    >>> deal(12, [1, 1, 2]), deal(5, [1, 1000, 1]), deal(2, [1, 1, 1])
    ([3, 3, 6], [1, 3, 1], [1, 1, 0])
    """
    if length <= len(speeds):
        return [int(rank < length) for rank in range(len(speeds))]
    total, free = sum(speeds), length - len(speeds)  # one for each, the rest where most is missing
    wanted = [length * speed / total for speed in speeds]
    above = [max(0.0, want - 1) for want in wanted]
    exact = [free * part / sum(above) for part in above] if sum(above) else [free / len(speeds)] * len(speeds)
    sizes = [1 + int(part) for part in exact]
    lacking = sorted(range(len(speeds)), key=lambda rank: (int(exact[rank]) - exact[rank], rank))
    for rank in lacking[: length - sum(sizes)]:
        sizes[rank] += 1
    return sizes


def span_by_speed(length: int, rank: int, speeds: Sequence[int]) -> slice:
    """As `span`, of shares that are dealt by speed.

    >>> [span_by_speed(8, rank, [1, 2, 1]) for rank in range(3)]
    [slice(0, 2, None), slice(2, 6, None), slice(6, 8, None)]
    """
    ends = list(accumulate(deal(length, speeds)))
    return slice(ends[rank - 1] if rank else 0, ends[rank])
