"""Rows that travel between ranks, and their gradients that travel back.

forward     rank 0  [ to 0 | to 1 ]  --.  .-->  [ from 0 | from 1 ]
            rank 1  [ to 0 | to 1 ]  --'  '-->  [ from 0 | from 1 ]
backward    the same, with what was sent and what was received in each other's place
"""

from typing import Any, final

from torch import Tensor
from torch.autograd import Function

from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import Sizes

__all__ = ["exchange_rows"]


def exchange_rows(group: AbstractGroup, rows: Tensor, send_sizes: Sizes, recv_sizes: Sizes) -> Tensor:
    """The rows that other ranks have for this one, in the order of ranks; differentiable. All ranks call it.

    Args:
        send_sizes: how many of the rows go to each rank, in the order of ranks.
        recv_sizes: how many come from each.
    """
    found: Tensor = _AllToAll.apply(group, rows, send_sizes, recv_sizes)  # type: ignore[no-untyped-call]
    return found


@final
class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, group: AbstractGroup, rows: Tensor, send_sizes: Sizes, recv_sizes: Sizes) -> Tensor:
        ctx.group, ctx.sizes = group, (send_sizes, recv_sizes)
        return _travel(group, rows, send_sizes, recv_sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        (gradient,), (send_sizes, recv_sizes) = gradients, ctx.sizes
        return None, _travel(ctx.group, gradient, recv_sizes, send_sizes), None, None


def _travel(group: AbstractGroup, rows: Tensor, send_sizes: Sizes, recv_sizes: Sizes) -> Tensor:
    output = rows.new_empty((sum(recv_sizes), *rows.shape[1:]))
    group.all_to_all(output, rows.contiguous(), send_sizes, recv_sizes)
    return output
