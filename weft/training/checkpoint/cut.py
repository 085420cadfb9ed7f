"""Cuts: the part of a tensor that a rank holds, in one or more parts, and cuts of what is held already.

    a weight (4, 6) of queries, keys and values, by heads         held by rank 0 of 2, (4, 3)

         q q  k k  v v                                                 q k v
         q q  k k  v v        parts [:, 0:1] [:, 2:3] [:, 4:5]         q k v     each is a view of the held tensor,
         q q  k k  v v                                                 q k v     with the strides of its rows
         q q  k k  v v                                                 q k v

Of that tensor a rank of `shard` may hold the flat piece [0:6], two rows: the same three parts, of two rows each, whose
elements lie three apart in the piece. So a held part is a box of the whole, and strides in the memory that is held.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import add, mul, sub
from typing import overload

import torch
from torch import Tensor

from weft.training.checkpoint.part import Part, boxes_of, flat, overlap, whole

__all__ = ["Cut", "HeldPart", "compose", "fused_cut", "whole_cut"]


@dataclass(frozen=True)
class HeldPart:
    """A part of a tensor, and where it lies in the memory of a rank that holds it among others.

    Args:
        start: of its first element there.
        strides: as many as the part has dimensions.
    """

    part: Part
    start: int
    strides: tuple[int, ...]

    def of(self, held: Tensor) -> Tensor:
        """Of a tensor that is held; a view of it if it is contiguous."""
        memory = held.contiguous().view(-1)
        return memory.as_strided(self.part.length, self.strides, memory.storage_offset() + self.start)


@dataclass(frozen=True)
class Cut:
    """A rank's tensor, which is a part of another, or several parts of it.

    Args:
        shape: of the whole.
        part: the one part that is held, as a tensor of shape `part.length`; None where there are several.
        parts: made of `part` where that is given.
        held_shape: of the tensor that is held; that of the part where that is given.
    """

    shape: tuple[int, ...]
    part: Part | None
    parts: tuple[HeldPart, ...] = ()
    held_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.part is not None:
            own = (HeldPart(self.part, 0, _contiguous(self.part.length)),) if self.part.size else ()
            object.__setattr__(self, "parts", own)
            object.__setattr__(self, "held_shape", self.part.length)
        num_elements = sum(part.part.size for part in self.parts)
        assert num_elements == prod(self.held_shape), "every element that is held is one of the whole"

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor that is held, from the whole: in memory of its own."""
        held = torch.empty(self.held_shape, dtype=tensor.dtype, device=tensor.device)
        dense = tensor.detach().contiguous()
        for part in self.parts:
            part.of(held).copy_(_part_of(dense, part.part))
        return held

    def put(self, held: Tensor, tensor: Tensor) -> None:
        """Write what is held to its places in the whole, in place; both are contiguous."""
        for part in self.parts:
            _part_of(tensor, part.part).copy_(part.of(held))

    def piece(self, begin: int, end: int) -> "Cut":
        """The cut of whoever holds the elements from `begin` to before `end` of the tensor that is held here, as a
        tensor of one dimension.

        >>> Cut((4, 2), Part((2, 0), (2, 2))).piece(2, 4).part
        Part(offset=(6,), length=(2,))
        """
        return compose(self, Cut(self.held_shape, flat(begin, end)))


def whole_cut(shape: Sequence[int]) -> Cut:
    """All of a tensor."""
    return Cut(tuple(shape), whole(shape))


def fused_cut(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Cut:
    """Slices of one dimension, one behind the other in the tensor that is held: the heads of a rank in a weight that
    makes queries, keys and values at once.

    Args:
        dim: of the tensor, which is cut there; a negative one counts from the last.
        ranges: the first and the one after the last of each slice.

    >>> [str(held.part) for held in fused_cut((4, 6), 1, [(0, 1), (2, 3), (4, 5)]).parts]
    ['[0:4, 0:1]', '[0:4, 2:3]', '[0:4, 4:5]']
    """
    shape, dim = tuple(shape), dim % len(shape)

    def box(begin: int, end: int) -> Part:
        length = (*shape[:dim], end - begin, *shape[dim + 1 :])
        return Part((*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)), length)

    if len(ranges) == 1:
        return Cut(shape, box(*ranges[0]))
    ends = list(accumulate((end - begin for begin, end in ranges), initial=0))
    held_shape = (*shape[:dim], ends[-1], *shape[dim + 1 :])
    strides = _contiguous(held_shape)
    boxes = zip((box(*one) for one in ranges), ends, strict=False)
    parts = (HeldPart(part, first * strides[dim], strides) for part, first in boxes if part.size)
    return Cut(shape, None, tuple(parts), held_shape)


@overload
def compose(outer: Cut, inner: Cut) -> Cut: ...
@overload
def compose(outer: Cut | None, inner: Cut | None) -> Cut | None: ...
def compose(outer: Cut | None, inner: Cut | None) -> Cut | None:
    """The part of the whole that a cut of a held tensor is.

    Args:
        outer: from the whole to a tensor that would be held; None for all of it.
        inner: from that tensor to the one that is held; None for all of it.
    """
    if outer is None or inner is None:
        return inner if outer is None else outer
    assert outer.held_shape == inner.shape, "the inner cut is one of the tensor that the outer one leaves"
    first, range_ = _first_of(outer), inner.part
    if first is not None and range_ is not None and len(range_.offset) == 1:  # one range, which is one chunk of a file
        return Cut(outer.shape, flat(first + range_.offset[0], first + range_.offset[0] + range_.length[0]))
    sources = [source for part in outer.parts for source in _sources(part, outer.held_shape)]
    parts = tuple(
        found
        for target in inner.parts
        for box in _targets(target, inner.shape)
        for source in sources
        for found in _through(source, box)
    )
    if len(parts) == 1 and parts[0] == HeldPart(parts[0].part, 0, _contiguous(inner.held_shape)):
        return Cut(outer.shape, parts[0].part)
    return Cut(outer.shape, None, parts, inner.held_shape)


def _first_of(cut: Cut) -> int | None:
    """Where a part begins whose elements follow each other in the whole: a range, or whole rows; None of others."""
    part, shape = cut.part, cut.shape
    if part is None or len(part.offset) == 1 != len(shape):
        return None if part is None else part.offset[0]
    is_split = [dim for dim, size in enumerate(part.length) if size != shape[dim]]
    if is_split and any(size != 1 for size in part.length[: is_split[-1]]):
        return None
    first: int = sum(map(mul, part.offset, _contiguous(shape)))
    return first


@dataclass(frozen=True)
class _Source:
    """A part of the whole, and the box of the tensor in between that it is; if that tensor has one dimension, the part
    in the order of its elements."""

    part: Part
    box: Part


def _sources(held: HeldPart, shape: tuple[int, ...]) -> Iterator[_Source]:
    """Where the tensor in between is flat, a part with strides is as many ranges as it has rows."""
    first, length = held.part.offset, held.part.length
    if len(shape) == len(length) > 1:
        offset = tuple(held.start // stride % size for stride, size in zip(_contiguous(shape), shape, strict=True))
        assert held.strides == _contiguous(shape), "boxes of a tensor have its strides"
        yield _Source(held.part, Part(offset, length))
        return
    assert len(shape) <= 1, "a held tensor has one dimension or those of the whole"
    num_rows = len(length)  # the dims before those whose elements lie one after the other
    while num_rows and held.strides[num_rows - 1] == prod(length[num_rows:]):
        num_rows -= 1
    for index in product(*map(range, length[:num_rows])):
        start = held.start + sum(map(mul, index, held.strides))
        row = _moved(Part((*index, *(0,) * len(length[num_rows:])), (*(1,) * num_rows, *length[num_rows:])), first)
        yield _Source(row, flat(start, start + row.size) if shape else whole(shape))


def _targets(held: HeldPart, shape: tuple[int, ...]) -> Iterator[HeldPart]:
    """A held part of the tensor in between, in boxes of it."""
    if len(held.part.length) == len(shape):
        yield held
        return
    start, (stride,) = held.start, held.strides
    for box in boxes_of(held.part, shape):
        yield HeldPart(box, start, tuple(stride * step for step in _contiguous(box.length)))
        start += stride * box.size


def _through(source: _Source, target: HeldPart) -> Iterator[HeldPart]:
    """The parts of the whole that a source and a box of the tensor in between have in common."""
    shared = overlap(source.box, target.part)
    if shared is None:
        return
    start = target.start + sum(
        (at - first) * stride
        for at, first, stride in zip(shared.offset, target.part.offset, target.strides, strict=True)
    )
    inside = Part(tuple(at - first for at, first in zip(shared.offset, source.box.offset, strict=True)), shared.length)
    if source.box.length == source.part.length:
        yield HeldPart(_moved(inside, source.part.offset), start, target.strides)
        return
    (stride,) = target.strides or (1,)
    for box in boxes_of(inside if shared.length else flat(0, 1), source.part.length):
        yield HeldPart(_moved(box, source.part.offset), start, tuple(stride * step for step in _contiguous(box.length)))
        start += stride * box.size


def _moved(box: Part, by: tuple[int, ...]) -> Part:
    return Part(tuple(map(add, box.offset, by)), box.length)


def _minus(at: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sub, at, first))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose elements lie one after the other."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _part_of(tensor: Tensor, part: Part) -> Tensor:
    """A view of a contiguous tensor."""
    if len(part.offset) != tensor.dim():
        return tensor.view(-1)[part.offset[0] : part.offset[0] + part.length[0]]
    for dim, (start, length) in enumerate(zip(part.offset, part.length, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
