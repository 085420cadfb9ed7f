"""Experts: feed-forward networks of one shape, stacked along the first dimension of their parameters.

    weight_in  [expert, width, hidden]      rows of tokens, sorted by expert     | 0 0 0 | 1 | 2 2 2 2 |
    weight_out [expert, hidden, width]      one product for each expert            W_0     W_1  W_2

A rank that holds some of the experts holds a part of each of these tensors: names are the same on all ranks.
Shape suffixes: n rows, w width, h hidden.
"""

import math
from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Carrier", "Compute", "Experts"]

Compute = Callable[[Tensor, list[int]], Tensor]
"""From rows, sorted by expert, and the number of each of the experts here to the rows that they give."""

Carrier = Callable[[Tensor, Tensor, Compute], Tensor]
"""From rows, sorted by expert, and the number of each of all experts to what they give, wherever they are: brings rows
there, has them computed, and brings them back in their order."""


@final
class Experts(nn.Module):
    """Each expert computes its own tokens.

    Args:
        hidden: the width between the two products.
    """

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight_in = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.bias_in = nn.Parameter(torch.empty(num_experts, hidden))
        self.weight_out = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.bias_out = nn.Parameter(torch.empty(num_experts, width))
        self.carrier: Carrier | None = None  # where experts are on several ranks
        for parameter, size in zip(self.parameters(), (width, width, hidden, hidden), strict=True):
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def forward(self, rows_nw: Tensor, counts: Tensor) -> Tensor:
        if self.carrier is not None:
            return self.carrier(rows_nw, counts, self.compute)
        return self.compute(rows_nw, counts.tolist())

    def compute(self, rows_nw: Tensor, counts: list[int]) -> Tensor:
        """With the experts that are here, of which each has the next so many rows."""
        parts = rows_nw.split(counts)
        # unbind, for its gradient is one stack; that of an index would be a tensor of all experts for each of them.
        both = zip(
            parts,
            self.weight_in.unbind(),
            self.bias_in.unbind(),
            self.weight_out.unbind(),
            self.bias_out.unbind(),
            strict=True,
        )
        found = [
            torch.addmm(bias_out, F.gelu(torch.addmm(bias_in, part_nw, weight_in)), weight_out)
            for part_nw, weight_in, bias_in, weight_out, bias_out in both
        ]
        return torch.cat(found)
