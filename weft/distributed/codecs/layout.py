"""Parts of a message of bytes: numbers that lie one after the other, each part read in place as its own type."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["split_bytes"]


def split_bytes(sent: Tensor, parts: Sequence[tuple[int, torch.dtype]]) -> tuple[Tensor, ...]:
    """Views of the first bytes as these parts, of so many numbers each; those with the widest numbers come first.

    >>> scales, codes = split_bytes(torch.zeros(16, dtype=torch.uint8), [(2, torch.float32), (5, torch.uint8)])
    >>> scales.shape, codes.shape
    (torch.Size([2]), torch.Size([5]))
    """
    views, begin = [], 0
    for number, dtype in parts:
        end = begin + number * dtype.itemsize
        views.append(sent[begin:end].view(dtype))
        begin = end
    return tuple(views)
