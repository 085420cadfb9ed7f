"""Tensors of a checkpoint that move to another number of ranks."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.training.checkpoint.cut import Cut, whole_cut
from weft.training.checkpoint.entry import Entry, Kind, Ranks, move
from weft.training.checkpoint.part import flat

Size = st.integers(1, 9)
Move = Callable[[Kind, int, int, int, Callable[[int], Tensor]], Tensor | None]


def after_move(kind: Kind, saved: Sequence[Tensor], size: int, move_: Move = move) -> list[Tensor]:
    found = [move_(kind, len(saved), rank, size, saved.__getitem__) for rank in range(size)]
    assert all(tensor is not None for tensor in found)
    return [tensor for tensor in found if tensor is not None]


def check_sum_is_kept(move_: Move, old: int, new: int) -> None:
    saved = [torch.arange(6, dtype=torch.float64).view(2, 3) + rank for rank in range(old)]
    after = after_move("sum", saved, new, move_)
    torch.testing.assert_close(torch.stack(after).sum(0), torch.stack(saved).sum(0), rtol=1e-12, atol=0)


@given(old=Size, new=Size)
def test_replicas_that_differ_go_on_from_their_mean_in_another_number(old: int, new: int) -> None:
    saved = [torch.arange(3, dtype=torch.float64) * rank for rank in range(old)]
    expected = saved if new == old else [torch.stack(saved).mean(0)] * new
    after = after_move("mean", saved, new)
    assert all(torch.equal(one, two) for one, two in zip(after, expected, strict=True))


def test_counters_of_replicas_are_not_averaged() -> None:
    assert after_move("mean", [torch.tensor(3), torch.tensor(3)], 3) == [torch.tensor(3)] * 3


@given(old=Size, new=Size)
def test_the_sum_over_ranks_is_kept(old: int, new: int) -> None:
    check_sum_is_kept(move, old, new)


def test_a_move_that_does_not_divide_the_sum_is_caught() -> None:
    def careless(kind: Kind, num_saved: int, rank: int, size: int, read: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([read(i) for i in range(num_saved)]).sum(0)

    with pytest.raises(AssertionError):
        check_sum_is_kept(careless, 2, 3)


@pytest.mark.parametrize("kind", ["sum", "mean", "own"])
def test_the_same_number_of_ranks_gets_its_own_back_and_reads_nothing_else(kind: Kind) -> None:
    for rank in range(4):
        read: list[int] = []
        move(kind, 4, rank, 4, lambda i, read=read: read.append(i) or torch.tensor(i))  # type: ignore[misc]
        assert read == [rank]


def test_a_tensor_of_one_rank_stays_with_it_and_a_new_rank_starts_afresh() -> None:
    saved = [torch.tensor(0), torch.tensor(1)]
    assert [move("own", 2, rank, 3, saved.__getitem__) for rank in range(3)] == [*saved, None]
    assert move("own", 2, 0, 1, saved.__getitem__) is saved[0]


def test_an_entry_is_the_part_that_it_says() -> None:
    entry = Entry(torch.ones(2), cut=Cut((2, 3), flat(4, 6)))
    assert (entry.shape, [held.part for held in entry.parts]) == ((2, 3), [flat(4, 6)])
    assert Entry(torch.ones(2, 3)).parts == whole_cut((2, 3)).parts
    with pytest.raises(AssertionError, match="is the part"):
        Entry(torch.ones(3), cut=Cut((2, 3), flat(4, 6)))


def test_values_of_different_lengths_are_gathered() -> None:
    values = [{"rank": 0, "text": "ä" * 9}, [], "short"]
    texts = [Ranks().gather_json(value) for value in values]
    assert texts == [[value] for value in values]
