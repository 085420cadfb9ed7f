"""Batches made by hand, shared between ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from tests.distributed.script.worlds import Noted, on_worlds
from weft.distributed.script.data.shares import make_share
from weft.distributed.script.world.world import find_world
from weft.errors import UsageError


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 12), st.data())
def test_shares_are_a_partition_along_any_dim(size: int, shape: list[int], length: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = length
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)

    def script(rank: int) -> tuple[torch.Tensor, float]:
        noted = Noted()
        own = weft.share(whole if rank == 0 else None, dim=dim)
        return own, noted.share.weight

    results = on_worlds(script, size)
    counted = [own for own, weight in results if weight]
    assert torch.equal(torch.cat(counted, dim) if counted else whole, whole)
    assert [weight for _, weight in results] == [own.shape[dim] / length if w else 0 for own, w in results]


def test_rank_0_s_batch_counts_and_others_may_draw_their_own() -> None:
    def script(rank: int) -> tuple[list[int], list[int]]:
        torch.manual_seed(rank)
        if rank == 0:
            torch.randn(100)  # it evaluates alone, and its generator runs ahead
        rows = torch.randint(1000, (5 + rank, 2))
        x, y = weft.share(rows[:, 0], rows[:, 1])
        return x.tolist(), y.tolist()

    torch.manual_seed(0)
    torch.randn(100)
    rows = torch.randint(1000, (5, 2)).tolist()
    (x0, y0), (x1, y1) = on_worlds(script, 2)
    assert [list(pair) for pair in zip(x0 + x1, y0 + y1, strict=True)] == rows and len(x0) == 3


def test_shares_are_contiguous_on_every_rank() -> None:
    """A script that flattened columns by `view` failed on rank 0 alone, whose share was a view of the whole."""

    def script(rank: int) -> list[int]:
        whole = torch.arange(12).view(4, 3)
        own: list[int] = weft.share(whole, dim=1).view(-1).tolist()
        return own

    assert on_worlds(script, 2) == [[0, 1, 3, 4, 6, 7, 9, 10], [2, 5, 8, 11]]


def test_rank_0_may_share_in_a_line_of_its_own() -> None:
    def script(rank: int) -> list[int]:
        if weft.is_first:  # noqa: SIM108
            own = weft.share(torch.arange(4))
        else:
            own = weft.share()
        first: list[int] = weft.broadcast(own.tolist())
        return [*first, *own.tolist()]

    assert on_worlds(script, 2) == [[0, 1, 0, 1], [0, 1, 2, 3]]


def test_nested_batches_are_cut_in_every_part() -> None:
    batch = {
        "ids": torch.arange(12).view(2, 6).t().bool(),
        "more": (torch.arange(6).to(torch.bfloat16), [np.arange(6), None]),
        "names": list("abcdef"),
    }

    def script(rank: int) -> Any:
        return weft.share(batch if rank == 0 else None)

    first, _, last = on_worlds(script, 3)
    assert first["names"] == ["a", "b"] and last["names"] == ["e", "f"]
    assert last["ids"].shape == (2, 2) and last["ids"].dtype is torch.bool
    assert (
        last["more"][0].dtype is torch.bfloat16 and last["more"][1][0].tolist() == [4, 5] and last["more"][1][1] is None
    )


def test_hidden_states_are_made_from_the_share_or_shared() -> None:
    """Language data of shape (time, batch): shared once along the batch, also before the model is woven."""

    def script(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], float]:
        data = weft.share(torch.zeros(9, 5) if rank == 0 else None, dim=1)
        hidden = weft.share(torch.zeros(2, 5, 8) if rank == 0 else None, dim=1)
        return tuple(data.shape), tuple(hidden.shape), make_share(find_world()).weight

    assert on_worlds(script, 2) == [((9, 3), (2, 3, 8), 3 / 5), ((9, 2), (2, 2, 8), 2 / 5)]


def test_a_batch_that_is_not_trained_on_leaves_the_weight_alone() -> None:
    def script(rank: int) -> tuple[int, float]:
        noted = Noted()
        weft.share(torch.zeros(3))
        with torch.no_grad():
            own = weft.share(torch.zeros(8))
        return len(own), noted.share.weight

    assert on_worlds(script, 2) == [(4, 2 / 3), (4, 1 / 3)]


def test_batches_are_weighed_by_what_a_function_counts() -> None:
    def script(rank: int) -> float:
        noted = Noted(weight=lambda batch: batch[1].sum())
        weft.share(torch.zeros(4), torch.tensor([1, 2, 3, 4]))
        return noted.share.weight

    assert on_worlds(script, 2) == [0.3, 0.7]


def test_one_process_gets_its_batch_back() -> None:
    noted = Noted()
    x, y = torch.zeros(3), torch.zeros(3)
    assert weft.share(x) is x and weft.share(x, y)[1] is y
    assert noted.share.weight == 1.0 and noted.share.num_batches == 2


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((torch.zeros(4, 3), torch.zeros(12)), r"differ in how many samples.*sizes: \[4, 12\]"),
        ((torch.zeros(4), torch.tensor(1.0)), r"no dim to share along \(dim: 0, shape: \(\)"),
        (({"a": torch.zeros(4), "b": object()},), "holds: object"),
        ((None,), "no tensor to share"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_batches_that_cannot_be_cut_are_refused(batch: tuple[Any, ...], text: str, size: int) -> None:
    with pytest.raises(UsageError, match=text):
        on_worlds(lambda rank: weft.share(*batch), size)
