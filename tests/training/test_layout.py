"""Tensors of a checkpoint that move to another number of ranks."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import CorruptFileError
from weft.training.layout import AVERAGED, PER_RANK, REPLICATED, SUMMED, Layout, part_for, sharded

WorldSize = st.integers(1, 9)
PartFor = Callable[[Layout, Sequence[Tensor], int, int], Tensor | None]


def parts_after(layout: Layout, parts: Sequence[Tensor], world_size: int, move: PartFor = part_for) -> list[Tensor]:
    found = [move(layout, parts, rank, world_size) for rank in range(world_size)]
    assert all(part is not None for part in found)
    return [part for part in found if part is not None]


def check_sum_is_kept(move: PartFor, old: int, new: int) -> None:
    parts = [torch.arange(6, dtype=torch.float64).view(2, 3) + rank for rank in range(old)]
    after = parts_after(SUMMED, parts, new, move)
    torch.testing.assert_close(torch.stack(after).sum(0), torch.stack(parts).sum(0), rtol=1e-12, atol=0)


@given(old=WorldSize, new=WorldSize, size=st.integers(0, 12), dim=st.integers(0, 2))
def test_a_sharded_tensor_is_cut_anew_without_loss(old: int, new: int, size: int, dim: int) -> None:
    shape = [2, 2, 2]
    shape[dim] = size
    whole = torch.arange(4 * size).view(shape)
    after = parts_after(sharded(dim), whole.tensor_split(old, dim), new)
    assert torch.equal(torch.cat(after, dim), whole)
    sizes = [part.shape[dim] for part in after]
    assert max(sizes) - min(sizes) <= 1


@given(cuts=st.lists(st.integers(0, 10), max_size=5), new=WorldSize)
def test_shards_of_any_size_are_joined(cuts: list[int], new: int) -> None:
    whole = torch.arange(10)
    parts = whole.tensor_split(sorted(cuts))
    assert torch.equal(torch.cat(parts_after(sharded(0), parts, new)), whole)


@given(old=WorldSize, new=WorldSize)
def test_replicas_that_differ_go_on_from_their_mean_in_another_number(old: int, new: int) -> None:
    parts = [torch.arange(3, dtype=torch.float64) * rank for rank in range(old)]
    after = parts_after(AVERAGED, parts, new)
    expected = parts if new == old else [torch.stack(parts).mean(0)] * new
    assert all(torch.equal(one, two) for one, two in zip(after, expected, strict=True))
    assert Layout.from_dict(AVERAGED.to_dict()) == AVERAGED


def test_counters_of_replicas_are_not_averaged() -> None:
    assert parts_after(AVERAGED, [torch.tensor(3), torch.tensor(3)], 3) == [torch.tensor(3)] * 3


@given(old=WorldSize, new=WorldSize)
def test_the_sum_over_ranks_is_kept(old: int, new: int) -> None:
    check_sum_is_kept(part_for, old, new)


def test_a_move_that_does_not_divide_the_sum_is_caught() -> None:
    def careless(layout: Layout, parts: Sequence[Tensor], rank: int, world_size: int) -> Tensor:
        return torch.stack(list(parts)).sum(0)

    with pytest.raises(AssertionError):
        check_sum_is_kept(careless, 2, 3)


@pytest.mark.parametrize("layout", [sharded(0), SUMMED, PER_RANK])
def test_the_same_number_of_ranks_gets_its_own_parts_back(layout: Layout) -> None:
    parts = [torch.full((3,), float(rank)) for rank in range(4)]
    assert all(part_for(layout, parts, rank, 4) is parts[rank] for rank in range(4))


@given(new=WorldSize)
def test_every_rank_gets_a_replicated_tensor(new: int) -> None:
    tensor = torch.arange(3)
    assert all(part is tensor for part in parts_after(REPLICATED, [tensor], new))


def test_a_tensor_of_one_rank_stays_with_it_and_a_new_rank_starts_afresh() -> None:
    parts = [torch.tensor(0), torch.tensor(1)]
    assert [part_for(PER_RANK, parts, rank, 3) for rank in range(3)] == [*parts, None]
    assert part_for(PER_RANK, parts, 0, 1) is parts[0]


@pytest.mark.parametrize("layout", [REPLICATED, SUMMED, PER_RANK, sharded(0), sharded(2)])
def test_layout_as_data(layout: Layout) -> None:
    assert Layout.from_dict(layout.to_dict()) == layout


@pytest.mark.parametrize("data", [{}, {"kind": "striped"}, {"kind": None}])
def test_unknown_layout(data: dict[str, str]) -> None:
    with pytest.raises(CorruptFileError, match="unknown layout"):
        Layout.from_dict(data)
