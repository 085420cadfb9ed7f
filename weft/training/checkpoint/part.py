"""Parts of a tensor: boxes, and ranges of the flattened tensor; what two of them have in common.

A tensor of shape (3, 4), whose elements are numbered in their order in memory:

     0  1  2  3      the box        offset (1, 1), length (2, 2)     5 6 9 10
     4  5  6  7      the range      offset (3,),   length (4,)       3 4 5 6
     8  9 10 11      their overlap                                   5 6

A range is a few boxes, at most one less than twice the dimensions, so that all overlaps are overlaps of boxes:

     .  .  .  3      3..7 of it     box (0, 3)+(1, 1), box (1, 0)+(1, 3)
     4  5  6  .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

__all__ = [
    "Overlap",
    "Part",
    "boxes_of",
    "copy_overlaps",
    "flat",
    "is_cover",
    "overlap",
    "overlaps",
    "subtract",
    "whole",
]


@dataclass(frozen=True)
class Part:
    """A box of a tensor, with as many offsets as the tensor has dimensions; or, with one, a range of the flattened
    tensor. A tensor of one dimension is flat, so that there they are the same."""

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.length)

    def __str__(self) -> str:
        """As Python slices it, such as [0:2, 4:8].

        >>> str(Part((0, 4), (2, 4)))
        '[0:2, 4:8]'
        """
        ends = zip(self.offset, self.length, strict=True)
        return f"[{', '.join(f'{start}:{start + length}' for start, length in ends)}]"


@dataclass(frozen=True)
class HeldBox:
    """A box of a part, and the place of its first element in the memory that holds the part."""

    box: Part
    start: int

    def view(self, held: Tensor, box: Part) -> Tensor:
        """A smaller box, in the memory that holds the part."""
        view = held.reshape(-1)[self.start : self.start + self.box.size].view(self.box.length)
        for dim, (start, first, length) in enumerate(zip(box.offset, self.box.offset, box.length, strict=True)):
            view = view.narrow(dim, start - first, length)
        return view


@dataclass(frozen=True)
class Overlap:
    """A box that is in two parts, and in which piece of each."""

    box: Part
    target: HeldBox
    source: HeldBox


def whole(shape: Sequence[int]) -> Part:
    return Part((0,) * len(shape), tuple(shape))


def flat(start: int, end: int) -> Part:
    """The elements from `start` to before `end`, in the order of memory."""
    return Part((start,), (end - start,))


def overlap(one: Part, other: Part) -> Part | None:
    """The box that two boxes have in common; None if that is empty.

    >>> overlap(flat(0, 4), flat(2, 9))
    Part(offset=(2,), length=(2,))
    """
    offset = tuple(map(max, one.offset, other.offset))
    ends = (tuple(map(sum, zip(part.offset, part.length, strict=True))) for part in (one, other))
    length = tuple(end - start for start, end in zip(offset, map(min, *ends), strict=True))
    return Part(offset, length) if all(n > 0 for n in length) else None


def subtract(one: Part, other: Part) -> list[Part]:
    """The boxes that are left of a box without what another has of it: slices before and after it, dim by dim.

    >>> [str(rest) for rest in subtract(Part((0, 0), (3, 3)), Part((1, 1), (9, 1)))]
    ['[0:1, 0:3]', '[1:3, 0:1]', '[1:3, 2:3]']
    """
    shared = overlap(one, other)
    if shared is None:
        return [one]
    rest: list[Part] = []
    for dim, (start, length) in enumerate(zip(shared.offset, shared.length, strict=True)):
        for first, end in ((one.offset[dim], start), (start + length, one.offset[dim] + one.length[dim])):
            if first < end:
                offset = (*shared.offset[:dim], first, *one.offset[dim + 1 :])
                rest.append(Part(offset, (*shared.length[:dim], end - first, *one.length[dim + 1 :])))
    return rest


def boxes_of(part: Part, shape: Sequence[int]) -> list[Part]:
    """The boxes that make up a part, in the order in which its elements lie in memory."""
    if _is_box(part, shape):
        return [part] if part.size else []
    if not shape:
        return [whole(shape)] * part.size  # one element, or none
    return list(_boxes_between(part.offset[0], part.offset[0] + part.length[0], tuple(shape)))


def overlaps(target: Part, source: Part, shape: Sequence[int]) -> list[Overlap]:
    """The overlap of two parts of one tensor of `shape`, in boxes."""
    return [
        Overlap(shared, own, theirs)
        for own in _pieces(target, source, shape)
        for theirs in _pieces(source, target, shape)
        if (shared := overlap(own.box, theirs.box))
    ]


def copy_overlaps(found: Sequence[Overlap], target: Tensor, source: Tensor) -> int:
    """Copy from what is held of one part to what is held of another; the number of elements. Both are contiguous."""
    for one in found:
        one.target.view(target, one.box).copy_(one.source.view(source, one.box))
    return sum(one.box.size for one in found)


def is_cover(parts: Sequence[Part], shape: Sequence[int]) -> bool:
    """Whether every element of a tensor is in exactly one of the parts."""
    boxes = [box for part in parts for box in boxes_of(part, shape)]
    if sum(box.size for box in boxes) != prod(shape):
        return False
    boxes.sort(key=lambda box: box.offset)
    for i, box in enumerate(boxes):
        for later in boxes[i + 1 :]:
            if later.offset and later.offset[0] >= box.offset[0] + box.length[0]:
                break  # so do all that come after it: they begin behind this one
            if overlap(box, later):
                return False
    return True


def _is_box(part: Part, shape: Sequence[int]) -> bool:
    return len(part.offset) == len(shape)


def _as_flat(part: Part, shape: Sequence[int]) -> Part | None:
    """The range that is the same part, where there is one that is easily told."""
    if len(part.offset) == 1:
        return part
    return flat(0, prod(shape)) if part == whole(shape) else None


def _pieces(part: Part, other: Part, shape: Sequence[int]) -> Iterator[HeldBox]:
    """The boxes of a part, to be compared with those of another; two ranges are compared as they are."""
    range_ = _as_flat(part, shape)
    if range_ is not None and _as_flat(other, shape) is not None:
        yield HeldBox(range_, 0)
        return
    start = 0
    for box in boxes_of(part, shape):
        yield HeldBox(box, start)
        start += box.size


def _boxes_between(start: int, end: int, shape: tuple[int, ...]) -> Iterator[Part]:
    """The elements from `start` to before `end`: the end of a first row, whole rows, the beginning of a last row; and
    so in each dimension, where a row is a tensor of the dimensions after it."""
    if start >= end:
        return
    row = prod(shape[1:])
    if len(shape) <= 1 or (start % row == 0 and end % row == 0):
        yield Part((start // row, *(0,) * len(shape[1:])), (end // row - start // row, *shape[1:]))
        return
    first, last = start // row, end // row
    if first == last:
        yield from _in_row(first, start % row, end % row, shape)
        return
    if start % row:
        yield from _in_row(first, start % row, row, shape)
        first += 1
    yield from _boxes_between(first * row, last * row, shape)
    yield from _in_row(last, 0, end % row, shape)


def _in_row(row: int, start: int, end: int, shape: tuple[int, ...]) -> Iterator[Part]:
    for box in _boxes_between(start, end, shape[1:]):
        yield Part((row, *box.offset), (1, *box.length))
