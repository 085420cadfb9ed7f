"""The weighted sum of gradients, piece by piece, in the order in which they are given."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["weighted_sum"]


def weighted_sum(gradients: Sequence[Sequence[Tensor | None]], shares: Sequence[float]) -> list[Tensor | None]:
    """A piece that only some have counts as zeros of the others, as among synchronous ranks; one that none has stays
    None.

    >>> weighted_sum([[torch.tensor([1.0]), None], [torch.tensor([3.0]), None]], [0.5, 0.5])
    [tensor([2.]), None]
    """
    total: list[Tensor | None] = []
    for found in zip(*gradients, strict=True):
        like = next((tensor for tensor in found if tensor is not None), None)
        if like is None:
            total.append(None)
            continue
        terms = [torch.zeros_like(like) if t is None else t * s for t, s in zip(found, shares, strict=True)]
        for term in terms[1:]:
            terms[0].add_(term)
        total.append(terms[0])
    return total
