"""Tokens to the ranks that hold their experts, and what these make of them back, in the order they were sent in.

    2 ranks, experts A B on rank 0 and C D on rank 1

    rank 0   A A B C D D   rows, sorted by expert      counts  2 1 | 1 2     1. counts, so that all know what comes
    rank 1   A C C C D     and so by rank              counts  1 0 | 3 1

    rank 0   A A B . A                                 from rank 0, then from rank 1      2. rows
             A A A . B                                 by expert: computed
             A A B . A                                 as they came                       3. back again

A rank sends and receives in a step, for each such layer, L experts and T rows of W numbers of b bytes that go to other
ranks: 8 * L bytes of counts, and T * W * b bytes four times: there and back, in forward and in backward.
"""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.expert.all_to_all import exchange_rows
from weft.distributed.placement.weighting import Weighting, scale_gradient
from weft.training.models.experts.feed_forward import Compute

__all__ = ["TokenExchange", "order_by_expert"]


@final
class TokenExchange:
    """The carrier of a layer's tokens.

    Args:
        group: the ranks along the axis `expert`, each of which has as many experts, in the order of ranks.
        weighting: says whether gradients of experts are averaged.
    """

    def __init__(self, group: AbstractGroup, weighting: Weighting) -> None:
        self._group = group
        self._weighting = weighting

    def __call__(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        sent = counts.view(self._group.size, -1)
        received = torch.empty_like(sent)
        self._group.all_to_all(received, sent)
        there, here = _sizes(sent), _sizes(received)
        arrived = exchange_rows(self._group, rows, there, here)
        order = order_by_expert(received)
        factor = self._group.size if self._weighting.averages else 1
        sorted_rows = scale_gradient(arrived.index_select(0, order), float(factor))
        found = scale_gradient(compute(sorted_rows, received.sum(0).tolist()), 1 / factor)
        return exchange_rows(self._group, found.index_select(0, order.argsort()), here, there)


def _sizes(counts: Tensor) -> tuple[int, ...]:
    return tuple(counts.sum(1).tolist())


def order_by_expert(counts: Tensor) -> Tensor:
    """Of rows that came rank by rank, from each sorted by expert, those of the first expert first.

    >>> order_by_expert(torch.tensor([[2, 1], [1, 0]])).tolist()  # A A B from rank 0, A from rank 1
    [0, 1, 3, 2]
    """
    num_ranks, num_experts = counts.shape
    expert = torch.arange(num_experts, device=counts.device).repeat(num_ranks).repeat_interleave(counts.flatten())
    return expert.argsort(stable=True)
