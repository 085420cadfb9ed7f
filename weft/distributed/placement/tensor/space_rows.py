"""Rows of pictures that a layer needs and other ranks have: halos, fetched forward, their gradients brought back.

3 ranks, a picture of 8 rows, a convolution of 3 rows with padding 1: every rank makes the output rows of its part

    row       0  1  2 | 3  4  5 | 6  7          parts are those of `parts_of`, before every layer and after it
    rank 0    o  o  o   h                       o: its own       h: fetched
    rank 1          h   o  o  o   h
    rank 2                    h   o  o

    backward: the gradient of a row that was fetched goes to the rank that has it, and is added to its own

With a stride the parts of outputs do not lie over those of inputs; the rows that they need do, wherever they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import span_of

__all__ = ["Window", "fetch_window", "spans_of", "sum_over"]

Span = tuple[int, int]
"""The first row, and the one after the last."""


@dataclass(frozen=True)
class Window:
    """The rows of an input from which a layer makes one row of its output.

    Args:
        fill: the value of rows beyond the picture.
    """

    kernel: int = 1
    stride: int = 1
    above: int = 0  # rows of padding
    below: int = 0
    dilation: int = 1
    fill: float = 0.0

    @property
    def reach(self) -> int:
        """Rows from the first to the last that an output row looks at.

        >>> Window(kernel=3, dilation=2).reach
        5
        """
        return self.dilation * (self.kernel - 1) + 1

    def num_outputs(self, num_rows: int) -> int:
        return (num_rows + self.above + self.below - self.reach) // self.stride + 1

    def needs(self, outputs: Span) -> Span:
        """The input rows of a span of output rows; some may lie beyond the picture.

        >>> Window(kernel=3, above=1, below=1).needs((3, 6))
        (2, 7)
        """
        first, end = outputs
        begin = first * self.stride - self.above
        return (begin, (end - 1) * self.stride - self.above + self.reach) if end > first else (begin, begin)


def spans_of(num_rows: int, num_ranks: int) -> list[Span]:
    spans = [span_of(num_rows, rank, num_ranks) for rank in range(num_ranks)]
    return [(begin, begin + length) for begin, length in spans]


def fetch_window(x: Tensor, window: Window, num_rows: int, group: AbstractGroup) -> Tensor:
    """[..., rows, width]: the rows that this rank's part of the outputs needs, padding included; its own in, of a
    picture of `num_rows`. A rank whose part is empty gets rows of nothing, so that it takes part in backward."""
    outputs = spans_of(window.num_outputs(num_rows), group.size)
    needed = [window.needs(span) for span in outputs]
    wanted = [(_inside(begin, num_rows), _inside(end, num_rows)) for begin, end in needed]
    rows = _fetch(x, group, spans_of(num_rows, group.size), wanted)
    (begin, end), (first, last) = needed[group.rank], wanted[group.rank]
    above, below = (first - begin, end - last) if end > begin else (window.reach, 0)
    return F.pad(rows, (0, 0, above, below), value=window.fill) if above or below else rows


def _inside(row: int, num_rows: int) -> int:
    return min(max(row, 0), num_rows)


def _fetch(x: Tensor, group: AbstractGroup, owned: Sequence[Span], wanted: Sequence[Span]) -> Tensor:
    if list(owned) == list(wanted):
        return x
    rows: Tensor = _Fetch.apply(x, group, owned, wanted)  # type: ignore[no-untyped-call]
    return rows


def _overlap(one: Span, other: Span) -> Span:
    begin, end = max(one[0], other[0]), min(one[1], other[1])
    return begin, max(begin, end)


@final
class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup, owned: Sequence[Span], wanted: Sequence[Span]) -> Tensor:
        mine, rank = owned[group.rank], group.rank
        ctx.group, ctx.own = group, mine
        ctx.given = [_overlap(mine, span) for span in wanted]
        ctx.taken = [_overlap(wanted[rank], span) for span in owned]
        given = [_cut(x, span, mine[0]) for span in ctx.given]
        pieces = _swap(group, given, [end - begin for begin, end in ctx.taken])
        return torch.cat(pieces, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        lengths = [end - begin for begin, end in ctx.taken]
        back = _swap(ctx.group, list(gradient.split(lengths, dim=-2)), [end - begin for begin, end in ctx.given])
        begin, end = ctx.own
        total = gradient.new_zeros(*gradient.shape[:-2], end - begin, gradient.shape[-1])
        for piece, span in zip(back, ctx.given, strict=True):
            _cut(total, span, begin).add_(piece)
        return total, None, None, None


def _cut(x: Tensor, span: Span, first: int) -> Tensor:
    begin, end = span
    return x.narrow(-2, begin - first if end > begin else 0, end - begin)


def _swap(group: AbstractGroup, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Every rank's piece for every other; those that a rank has for itself do not travel."""
    outer, width = pieces[0].shape[:-2], pieces[0].shape[-1]
    row = outer.numel() * width
    sent = tuple(0 if rank == group.rank else piece.numel() for rank, piece in enumerate(pieces))
    received = tuple(0 if rank == group.rank else row * length for rank, length in enumerate(lengths))
    message = torch.cat([piece.reshape(-1)[: sent[rank]] for rank, piece in enumerate(pieces)])
    output = message.new_empty(sum(received))
    group.all_to_all(output, message, sent, received)
    return [
        part.view(*outer, length, width) if rank != group.rank else pieces[rank]
        for rank, (part, length) in enumerate(zip(output.split(received), lengths, strict=True))
    ]


def sum_over(x: Tensor, group: AbstractGroup) -> Tensor:
    """The sum over ranks, with which each goes on to do different things: so do gradients come back."""
    total: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]
    return total


@final
class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def _summed(x: Tensor, group: AbstractGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total
