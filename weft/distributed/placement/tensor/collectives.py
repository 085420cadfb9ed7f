"""Collectives that gradients flow through: each with the one that its backward needs.

    function    forward                     backward                      where
    copy        as it is                    all-reduce                    into a layer that is split by its outputs
    add_up      all-reduce                  as it is                      out of a layer that is split by its inputs
    gather      all-gather                  own part                      outputs of parts, for layers that are whole
    scatter     own part                    all-gather                    a whole tensor, for layers that have parts
    collect     all-gather                  reduce-scatter                parts of a sequence, into a split layer
    spread      reduce-scatter              all-gather                    out of a split layer, to parts of a sequence

Between a copy and an add_up every rank computes with its own part; outside of them all ranks compute the same, and so
have the same gradient. `gather` takes its own part of a gradient that all ranks have; `collect` adds up gradients that
each rank has another of.

Parts are those of `parts_of`: in the order of ranks, the first ones larger by one where they are not equal.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup, AbstractWork

__all__ = ["add_up", "collect", "copy", "gather", "parts_of", "scatter", "span_of", "spread", "start_sum"]


def parts_of(size: int, num_parts: int) -> tuple[int, ...]:
    """The sizes of the parts of `size` things.

    >>> parts_of(10, 4)
    (3, 3, 2, 2)
    """
    return tuple(size // num_parts + (part < size % num_parts) for part in range(num_parts))


def span_of(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """Where a part begins, and its size.

    >>> span_of(10, 2, 4)
    (6, 2)
    """
    sizes = parts_of(size, num_parts)
    return sum(sizes[:part]), sizes[part]


TakePart = Callable[[Tensor, AbstractGroup, int], Tensor]
"""Of a tensor, along a dimension: this rank's part."""


def copy(x: Tensor, group: AbstractGroup) -> Tensor:
    """The same tensor; gradients of all ranks, which used it for different things, are added up."""
    result: Tensor = _Copy.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def add_up(x: Tensor, group: AbstractGroup) -> Tensor:
    """The sum over ranks, on all of them."""
    result: Tensor = _AddUp.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def gather(x: Tensor, group: AbstractGroup, dim: int, size: int) -> Tensor:
    """Parts put together; all ranks go on to do the same with the whole.

    Args:
        dim: along which they lie.
        size: its length in the whole.
    """
    result: Tensor = _MakeWhole.apply(x, group, dim, size, own_part)  # type: ignore[no-untyped-call]
    return result


def scatter(x: Tensor, group: AbstractGroup, dim: int) -> Tensor:
    """This rank's part along `dim` of a tensor that all ranks have."""
    result: Tensor = _TakePart.apply(x, group, dim, own_part)  # type: ignore[no-untyped-call]
    return result


def collect(x: Tensor, group: AbstractGroup, dim: int, size: int) -> Tensor:
    """As `gather`, for ranks that go on to do different things with the whole.

    Args:
        dim: along which parts lie.
        size: its length in the whole.
    """
    result: Tensor = _MakeWhole.apply(x, group, dim, size, part_of_sum)  # type: ignore[no-untyped-call]
    return result


def spread(x: Tensor, group: AbstractGroup, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum over ranks."""
    result: Tensor = _TakePart.apply(x, group, dim, part_of_sum)  # type: ignore[no-untyped-call]
    return result


def start_sum(x: Tensor, group: AbstractGroup) -> AbstractWork:
    """Begin to add up over ranks, in place; `x` is dense."""
    return group.start(AllReduce(x))


def sum_of(x: Tensor, group: AbstractGroup) -> Tensor:
    """In memory of its own: autograd may give the same tensor to others."""
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def put_together(x: Tensor, group: AbstractGroup, dim: int, size: int) -> Tensor:
    """Parts travel as they lie in memory, and are put side by side when they are all there."""
    lengths = parts_of(size, group.size)
    rest = prod((*x.shape[:dim], *x.shape[dim:][1:]))  # a rank may have nothing of what others have
    sizes = tuple(rest * length for length in lengths)
    everyone = x.new_empty(sum(sizes))
    group.all_gather(everyone, x.contiguous().view(-1), None if len(set(sizes)) == 1 else sizes)
    shapes = [(*x.shape[:dim], length, *x.shape[dim:][1:]) for length in lengths]
    parts = [part.view(shape) for part, shape in zip(everyone.split(sizes), shapes, strict=True)]
    return torch.cat(parts, dim)


def own_part(x: Tensor, group: AbstractGroup, dim: int) -> Tensor:
    return x.narrow(dim, *span_of(x.shape[dim], group.rank, group.size)).contiguous()


def part_of_sum(x: Tensor, group: AbstractGroup, dim: int) -> Tensor:
    sizes = parts_of(x.shape[dim], group.size)
    rest = x.numel() // max(1, x.shape[dim])
    message = torch.cat([part.reshape(-1) for part in x.split(sizes, dim)])
    own = x.new_empty(rest * sizes[group.rank])
    group.reduce_scatter(own, message, "sum", tuple(rest * size for size in sizes))
    return own.view(*x.shape[:dim], sizes[group.rank], *x.shape[dim:][1:])


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_of(gradient, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup) -> Tensor:
        return sum_of(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _MakeWhole(torch.autograd.Function):
    """Parts to the whole; `back` takes this rank's part of its gradient, or of the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup, dim: int, size: int, back: TakePart) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim % x.dim(), back
        return put_together(x, group, ctx.dim, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(gradient, ctx.group, ctx.dim), None, None, None, None


class _TakePart(torch.autograd.Function):
    """The whole, or the sum of all ranks', to parts, by `take`; gradients of parts are put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AbstractGroup, dim: int, take: TakePart) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim % x.dim(), x.shape[dim]
        return take(x, group, ctx.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return put_together(gradient, ctx.group, ctx.dim, ctx.size), None, None, None
