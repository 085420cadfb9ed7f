"""The order in which tokens are computed: by expert, and no more of a group for each expert than its capacity.

    experts of 4 tokens, 2 each      token      0   1   2   3
                                     first      B   B   A   B
                                     second     A   C   B   C

    capacity 2, in the order of      A: 2  0        first choices come before second ones, early tokens before late ones
    experts                          B: 0  1        (3 and 2 are left out)
                                     C: 1  3

A group is what capacity counts over: the tokens of one sample. What becomes of a token hangs on its own sample alone,
and is the same however samples are dealt out to ranks, micro-batches and batches.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Routing", "capacity_of", "route"]


@dataclass(frozen=True)
class Routing:
    """The assignments of tokens to experts that are carried out, in the order of experts, within one in that of groups.

    Args:
        places: of each in the choices of all tokens, first choices first.
        tokens: that are computed.
        counts: of each expert.
    """

    places: Tensor
    tokens: Tensor
    counts: Tensor


def capacity_of(factor: float | None, top_k: int, num_tokens: int, num_experts: int) -> int | None:
    """Tokens of a group that an expert takes: `factor` times what it would get if all experts got as many.

    >>> capacity_of(1.25, 2, 64, 8), capacity_of(0.1, 1, 4, 8), capacity_of(None, 2, 64, 8)
    (20, 1, None)
    """
    return None if factor is None else max(1, math.ceil(factor * top_k * num_tokens / num_experts))


def route(experts_kt: Tensor, num_groups: int, num_experts: int, capacity: int | None) -> Routing:
    """Sort the choices of all tokens, those of a group next to each other, by expert.

    Args:
        experts_kt: the expert of each choice of each token.
        capacity: the most tokens of a group that an expert takes; None for all.
    """
    num_tokens = experts_kt.shape[1]
    length = num_tokens // max(1, num_groups)
    group_t = torch.arange(num_tokens, device=experts_kt.device) // max(1, length)
    line = (experts_kt * num_groups + group_t).flatten()  # of each choice: one for every expert and group
    order = line.argsort(stable=True)
    sizes = torch.bincount(line, minlength=num_experts * num_groups)
    if capacity is not None:
        line = line[order]
        first = sizes.cumsum(0) - sizes
        order = order[torch.arange(len(order), device=order.device) - first[line] < capacity]
        sizes = sizes.clamp(max=capacity)
    return Routing(order, order % max(1, num_tokens), sizes.view(num_experts, num_groups).sum(1))
