"""Cuts: parts of a tensor that a rank holds, one or several, and cuts of cuts."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.training.checkpoint import Cut, Part, compose, flat, fused_cut, whole_cut
from weft.training.checkpoint.part import overlap, subtract


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(prod(shape)).view(shape)


def check(cut: Cut, expected: Tensor) -> None:
    """It takes what is expected from the whole, and puts it back there."""
    tensor, back = numbered(cut.shape), torch.full(cut.shape, -1)
    held = cut.take(tensor)
    assert torch.equal(held, expected)
    cut.put(held, back)
    assert sorted(back[back >= 0].tolist()) == sorted(expected.flatten().tolist())
    assert torch.equal(back[back >= 0], tensor[back >= 0])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_slices_of_a_fused_weight_lie_behind_each_other(dim: int) -> None:
    tensor = numbered((6, 6, 2))
    slices = [tensor.narrow(dim, 0, 1), tensor.narrow(dim, 1, 1)]
    check(fused_cut(tensor.shape, dim, [(0, 1), (1, 2)]), torch.cat(slices, dim))


def test_one_slice_is_a_box_of_its_own() -> None:
    assert fused_cut((4, 6), 1, [(2, 5)]) == Cut((4, 6), Part((0, 2), (4, 3)))
    assert whole_cut((4, 6)).take(numbered((4, 6))).tolist() == numbered((4, 6)).tolist()


def test_a_flat_piece_of_a_fused_weight_has_its_strides() -> None:
    cut = fused_cut((4, 6), 1, [(0, 1), (2, 3), (4, 5)])
    held = cut.take(numbered((4, 6)))
    check(cut.piece(0, 6), held.flatten()[0:6])
    check(cut.piece(2, 11), held.flatten()[2:11])
    assert [part.strides for part in cut.piece(0, 6).parts] == [(3, 1)] * 3


def test_all_of_a_tensor_changes_no_cut() -> None:
    cut = fused_cut((4, 6), 0, [(0, 1), (2, 3)])
    assert compose(None, cut) == cut == compose(cut, None) and compose(None, None) is None
    assert compose(whole_cut((4, 6)), Cut((4, 6), Part((1, 0), (2, 6)))) == Cut((4, 6), Part((1, 0), (2, 6)))
    assert Cut((4, 6), Part((1, 0), (2, 6))).piece(0, 0).take(numbered((4, 6))).tolist() == []


def test_a_cut_that_holds_more_than_its_parts_is_none() -> None:
    with pytest.raises(AssertionError, match="every element that is held"):
        Cut((4, 6), None, fused_cut((4, 6), 0, [(0, 1), (2, 3)]).parts, (3, 6))
    with pytest.raises(AssertionError, match="the inner cut is one of"):
        compose(Cut((4, 6), flat(0, 4)), Cut((4, 6), flat(0, 4)))


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Part(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """A box, a range, or slices of a dimension."""
    kind = draw(st.sampled_from(["box", "flat", "fused"] if shape else ["flat"]))
    if kind == "flat":
        start, end = sorted(draw(st.integers(0, prod(shape))) for _ in range(2))
        return Cut(shape, flat(start, end))
    if kind == "box":
        return Cut(shape, draw(boxes(shape)))
    dim = draw(st.integers(0, len(shape) - 1))
    bounds = sorted(draw(st.integers(0, shape[dim])) for _ in range(4))
    return fused_cut(shape, dim, [(bounds[0], bounds[1]), (bounds[2], bounds[3])])


@given(st.data())
def test_a_cut_of_a_cut_of_a_cut_holds_what_is_cut_one_after_the_other(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    tensor, total = numbered(shape), None
    for _ in range(3):
        cut = data.draw(cuts(tuple(tensor.shape)))
        tensor, total = cut.take(tensor), compose(total, cut)
        assert total is not None
        check(total, tensor)


@given(st.data())
def test_a_box_is_what_another_has_of_it_and_the_rest(data: st.DataObject) -> None:
    shape = data.draw(shapes.filter(bool))
    one, other = (data.draw(boxes(shape)) for _ in range(2))
    count = torch.zeros(shape, dtype=torch.int64)
    for box in (*subtract(one, other), *filter(None, [overlap(one, other)])):
        Cut(shape, box).put(torch.ones(box.length, dtype=torch.int64), found := torch.zeros_like(count))
        count += found
    expected = torch.zeros_like(count)
    Cut(shape, one).put(torch.ones(one.length, dtype=torch.int64), expected)
    assert torch.equal(count, expected)
