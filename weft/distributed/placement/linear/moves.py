"""Activations on their way between two layouts, and their gradients on the way back.

2 ranks; rank 0 has samples a b, rank 1 has c; every sample has features 1 2 3 4

    own        rank 0   a1 a2 a3 a4      part       rank 0   a1 a2      whole      both   a1 a2 a3 a4
                        b1 b2 b3 b4                          b1 b2                        b1 b2 b3 b4
               rank 1   c1 c2 c3 c4                          c1 c2                        c1 c2 c3 c4
                                                    rank 1   a3 a4 ...

    move               call              elements that a rank sends,      its gradient
                                         times samples (N - 1) / N
    own  -> whole      all-gather        F                                sum -> own
    part -> whole      all-gather        F                                sum -> part
    own  -> part       all-to-all        F / N                            part -> own
    part -> own        all-to-all        F / N                            own -> part
    sum  -> own        reduce-scatter    F                                own -> whole
    sum  -> part       reduce-scatter    F                                part -> whole

A sum is a term of `whole` on every rank. Samples and features may be dealt out unequally.
"""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup

__all__ = ["Deal", "Layout", "move"]

Layout = Literal["own", "part", "whole", "sum"]


@dataclass(frozen=True)
class Deal:
    """Who has which samples and which features.

    Args:
        rows: samples of each rank.
        columns: features of each rank.
    """

    group: AbstractGroup
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def own_rows(self) -> int:
        return self.rows[self.group.rank]

    @property
    def own_columns(self) -> int:
        return self.columns[self.group.rank]


def move(tensor: Tensor, deal: Deal, source: Layout, target: Layout) -> Tensor:
    """[samples, features] in one layout, from the same in another; differentiable. All ranks call it."""
    if source == target:
        return tensor
    moved: Tensor = _Move.apply(tensor, deal, source, target)  # type: ignore[no-untyped-call]
    return moved


@final
class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, deal: Deal, source: Layout, target: Layout) -> Tensor:
        ctx.way = deal, source, target
        return _MOVES[source, target](tensor, deal)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        deal, source, target = ctx.way
        back = _MOVES[_GRADIENT[target], _GRADIENT[source]]
        return back(gradients[0], deal), None, None, None


_GRADIENT: dict[Layout, Layout] = {"own": "own", "part": "part", "whole": "sum", "sum": "whole"}
"""The layout of a gradient: that of something which every rank has used is a sum, and that of a sum is for all."""


def _own_to_whole(tensor: Tensor, deal: Deal) -> Tensor:
    output = tensor.new_empty(sum(deal.rows), sum(deal.columns))
    deal.group.all_gather(output, tensor.contiguous(), deal.rows)
    return output


def _sum_to_own(tensor: Tensor, deal: Deal) -> Tensor:
    output = tensor.new_empty(deal.own_rows, sum(deal.columns))
    deal.group.reduce_scatter(output, tensor.contiguous(), sizes=deal.rows)
    return output


def _part_to_whole(tensor: Tensor, deal: Deal) -> Tensor:
    output = tensor.new_empty(sum(deal.columns), sum(deal.rows))
    deal.group.all_gather(output, tensor.t().contiguous(), deal.columns)
    return output.t().contiguous()


def _sum_to_part(tensor: Tensor, deal: Deal) -> Tensor:
    output = tensor.new_empty(deal.own_columns, sum(deal.rows))
    deal.group.reduce_scatter(output, tensor.t().contiguous(), sizes=deal.columns)
    return output.t().contiguous()


def _own_to_part(tensor: Tensor, deal: Deal) -> Tensor:
    """Blocks of this rank's samples, one for each rank; what comes is one block above the other."""
    blocks = [block.reshape(-1) for block in tensor.split(deal.columns, dim=1)]
    output = tensor.new_empty(sum(deal.rows) * deal.own_columns)
    sent = tuple(deal.own_rows * columns for columns in deal.columns)
    received = tuple(rows * deal.own_columns for rows in deal.rows)
    deal.group.all_to_all(output, torch.cat(blocks), sent, received)
    return output.view(-1, deal.own_columns) if deal.own_columns else output.view(sum(deal.rows), 0)


def _part_to_own(tensor: Tensor, deal: Deal) -> Tensor:
    """The rows of each rank; what comes is one block beside the other."""
    sent = tuple(rows * deal.own_columns for rows in deal.rows)
    received = tuple(deal.own_rows * columns for columns in deal.columns)
    output = tensor.new_empty(sum(received))
    deal.group.all_to_all(output, tensor.contiguous().view(-1), sent, received)
    blocks = zip(output.split(received), deal.columns, strict=True)
    return torch.cat([block.view(deal.own_rows, columns) for block, columns in blocks], dim=1)


_MOVES = {
    ("own", "whole"): _own_to_whole,
    ("part", "whole"): _part_to_whole,
    ("own", "part"): _own_to_part,
    ("part", "own"): _part_to_own,
    ("sum", "own"): _sum_to_own,
    ("sum", "part"): _sum_to_part,
}
