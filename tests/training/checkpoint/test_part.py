"""Boxes and ranges of a tensor: any way to cut it, loaded in any other way, is the same tensor."""

from collections.abc import Callable, Sequence
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.training.checkpoint.part import (
    Overlap,
    Part,
    boxes_of,
    copy_overlaps,
    flat,
    is_cover,
    overlap,
    overlaps,
    whole,
)

Shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
Copy = Callable[[Sequence[Overlap], Tensor, Tensor], int]


def numbered(shape: tuple[int, ...]) -> Tensor:
    """A tensor whose values are the places of its elements."""
    return torch.arange(prod(shape)).view(shape)


def held(part: Part, shape: tuple[int, ...]) -> Tensor:
    """What a rank has of the numbered tensor, by slices of Python alone."""
    tensor = numbered(shape) if len(part.offset) == len(shape) else numbered(shape).reshape(-1)
    slices = tuple(slice(start, start + n) for start, n in zip(part.offset, part.length, strict=True))
    return tensor[slices].clone() if slices else tensor.clone()


@st.composite
def flat_cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Part]:
    """The ranges of some ranks, as ZeRO cuts a tensor; empty ones are among them."""
    ends = sorted(draw(st.lists(st.integers(0, prod(shape)), max_size=4)))
    return [flat(start, end) for start, end in zip([0, *ends], [*ends, prod(shape)], strict=True)]


@st.composite
def box_cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Part]:
    """The boxes of some ranks, as tensor parallelism cuts a tensor, in several dimensions at once."""
    boxes = [whole(shape)]
    for dim, size in enumerate(shape):
        at = draw(st.integers(0, size))
        halves = ((0, at), (at, size - at)) if draw(st.booleans()) else ((0, size),)
        boxes = [
            Part((*box.offset[:dim], start, *box.offset[dim + 1 :]), (*box.length[:dim], n, *box.length[dim + 1 :]))
            for box in boxes
            for start, n in halves
        ]
    return boxes


@st.composite
def shapes_and_two_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Part], list[Part]]:
    shape = draw(Shapes)
    cuts = st.one_of(flat_cuts(shape), box_cuts(shape))
    return shape, draw(cuts), draw(cuts)


def check_cut_anew(shape: tuple[int, ...], saved: list[Part], wanted: list[Part], copy: Copy = copy_overlaps) -> None:
    for part in wanted:
        target = torch.full(part.length, -1)
        copied = sum(copy(overlaps(part, chunk, shape), target, held(chunk, shape)) for chunk in saved)
        assert torch.equal(target, held(part, shape)), (part, target)
        assert copied == part.size


@given(case=shapes_and_two_cuts())
def test_any_cut_is_loaded_as_any_other_cut(case: tuple[tuple[int, ...], list[Part], list[Part]]) -> None:
    check_cut_anew(*case)


def test_a_copy_that_forgets_a_box_is_caught() -> None:
    def forgetful(found: Sequence[Overlap], target: Tensor, source: Tensor) -> int:
        return copy_overlaps(found[1:], target, source)

    with pytest.raises(AssertionError):
        check_cut_anew((3, 4), [flat(0, 5), flat(5, 12)], [Part((0, 0), (3, 2)), Part((0, 2), (3, 2))], forgetful)


@given(case=shapes_and_two_cuts())
def test_every_cut_is_a_cover_and_one_that_lacks_or_repeats_a_part_is_none(
    case: tuple[tuple[int, ...], list[Part], list[Part]],
) -> None:
    shape, one, other = case
    assert is_cover(one, shape) and is_cover(other, shape)
    for part in one:
        if part.size:
            assert not is_cover([p for p in one if p is not part], shape)
            assert not is_cover([*one, part], shape)


def test_parts_that_overlap_as_much_as_they_leave_out_are_no_cover() -> None:
    assert not is_cover([Part((0, 0), (2, 3)), Part((0, 2), (2, 1))], (2, 4))
    assert not is_cover([flat(0, 3), flat(2, 3)], (2, 2))


@given(shape=Shapes, data=st.data())
def test_a_range_is_few_boxes_in_the_order_of_memory(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, end = sorted(data.draw(st.lists(st.integers(0, prod(shape)), min_size=2, max_size=2)))
    boxes = boxes_of(flat(start, end), shape)
    numbers = [n for box in boxes for n in held(box, shape).reshape(-1).tolist()]
    assert numbers == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_picture_of_the_module() -> None:
    box, run, shape = Part((1, 1), (2, 2)), flat(3, 7), (3, 4)
    assert held(box, shape).reshape(-1).tolist() == [5, 6, 9, 10]
    assert boxes_of(run, shape) == [Part((0, 3), (1, 1)), Part((1, 0), (1, 3))]
    assert [held(one.box, shape).tolist() for one in overlaps(box, run, shape)] == [[[5, 6]]]
    assert overlap(Part((0, 0), (1, 4)), box) is None and str(box) == "[1:3, 1:3]"
