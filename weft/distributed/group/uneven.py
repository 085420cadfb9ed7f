"""Parts whose lengths only their own rank knows: a small exchange of the lengths first, then the data."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.distributed.group.calls import Sizes
from weft.distributed.group.group import AbstractGroup

__all__ = ["exchange_lengths", "gather_lengths", "gather_parts"]


def gather_lengths(group: AbstractGroup, length: int) -> Sizes:
    """The number that each rank brings, in rank order: the `sizes` of an all-gather. A collective call."""
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(lengths, torch.tensor([length]))
    return tuple(lengths.tolist())


def exchange_lengths(group: AbstractGroup, lengths: Sequence[int]) -> Sizes:
    """Number i goes to rank i: from what a rank sends, the `recv_sizes` of its all-to-all. A collective call."""
    received = torch.empty(group.size, dtype=torch.int64)
    group.all_to_all(received, torch.tensor(tuple(lengths), dtype=torch.int64))
    return tuple(received.tolist())


def gather_parts(group: AbstractGroup, tensor: Tensor) -> tuple[Tensor, ...]:
    """Every rank's tensor, in rank order, whatever its first dimension. Two collective calls.

    Args:
        tensor: (rows, ...); ranks may bring different numbers of rows, and none, of the same shape and type.

    Returns:
        One tensor for each rank, (its rows, ...): views of one tensor.

    >>> from weft.distributed.group.solo import SoloGroup
    >>> gather_parts(SoloGroup(), torch.tensor([3, 5]))
    (tensor([3, 5]),)
    """
    sizes = gather_lengths(group, len(tensor))
    output = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
    group.all_gather(output, tensor, sizes)
    parts: tuple[Tensor, ...] = output.split(sizes)
    return parts
