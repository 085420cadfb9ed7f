"""Means, sums and values of all ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from tests.distributed.script.worlds import Noted, on_worlds
from tests.processes.ranks import run_processes
from weft.distributed.script.calls import reductions
from weft.distributed.script.calls.trees import outline_of
from weft.errors import OutOfStepError, UsageError

FLOATS = st.floats(-1e6, 1e6)


def same(found: list[Any]) -> Any:
    """Of all ranks, which have the same bits."""
    outline, tensors = outline_of(found[0])
    for other in found[1:]:
        assert outline_of(other)[0] == outline
        assert all(torch.equal(a, b) for a, b in zip(outline_of(other)[1], tensors, strict=True))
    return found[0]


# ---- who this rank is


def test_ranks_know_who_they_are() -> None:
    assert on_worlds(lambda rank: (weft.rank, weft.num_ranks, weft.is_first), 2) == [(0, 2, True), (1, 2, False)]
    assert (weft.rank, weft.num_ranks, weft.is_first) == (0, 1, True)


def test_rank_0_alone_prints(capsys: pytest.CaptureFixture[str]) -> None:
    on_worlds(lambda rank: weft.print("rank", rank, sep="="), 3)
    assert capsys.readouterr().out == "rank=0\n"


# ---- means and sums


def test_numbers_are_added_up_and_averaged() -> None:
    assert same(on_worlds(lambda rank: (weft.sum(rank), weft.mean(rank)), 4)) == (6, 1.5)
    assert same(on_worlds(lambda rank: weft.mean(10.0**rank, weight=rank), 3)) == (10 + 200) / 3
    assert same(on_worlds(lambda rank: weft.sum(rank == 1), 3)) == 1
    assert isinstance(weft.sum(True), int) and isinstance(weft.mean(3), float)


@given(st.lists(FLOATS, min_size=2, max_size=4))
def test_sums_are_in_rank_order(values: list[float]) -> None:
    total = values[0]
    for value in values[1:]:
        total += value
    assert on_worlds(lambda rank: weft.sum(values[rank]), len(values)) == [total] * len(values)
    wide = on_worlds(lambda rank: weft.sum(torch.tensor([values[rank]] * 2, dtype=torch.float64)), len(values))
    assert same(wide).tolist() == [total] * 2


TYPES = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.float64, torch.float64, torch.float64),
    (torch.complex64, torch.complex64, torch.complex64),
    (torch.int32, torch.int64, torch.float32),
    (torch.uint8, torch.int64, torch.float32),
    (torch.bool, torch.int64, torch.float32),
]


@pytest.mark.parametrize(("given_type", "sum_type", "mean_type"), TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3)])
def test_tensors_of_every_type_come_back(
    given_type: Any, sum_type: Any, mean_type: Any, shape: tuple[int, ...]
) -> None:
    def script(rank: int) -> tuple[Tensor, Tensor]:
        own = torch.full(shape, rank + 1).to(given_type).requires_grad_(given_type is torch.float32)
        return weft.sum(own), weft.mean(own)

    total, mean = same(on_worlds(script, 3))
    count = 3 if given_type is torch.bool else 6
    assert torch.equal(total, torch.full(shape, count, dtype=sum_type)) and not total.requires_grad
    assert torch.equal(mean, torch.full(shape, count / 3, dtype=mean_type))
    alone = torch.ones(shape).to(given_type)
    assert torch.equal(weft.sum(alone), torch.ones(shape, dtype=sum_type)) and weft.mean(alone).dtype is mean_type


def test_large_tensors_are_gathered_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "CHUNK", 4)
    found = same(on_worlds(lambda rank: weft.mean(torch.arange(10.0).view(5, 2) * rank), 3))
    assert torch.equal(found, torch.arange(10.0).view(5, 2))


def test_dicts_lists_and_tuples_keep_their_form() -> None:
    def script(rank: int) -> Any:
        return weft.sum({"a": rank, "b": [torch.tensor(rank), (np.full(2, rank), 0.5)], 3: torch.ones(2)})

    found = on_worlds(script, 3)[1]
    assert found["a"] == 3 and found["b"][0].dtype is torch.int64 and int(found["b"][0]) == 3
    assert found["b"][1][0].tolist() == [3, 3] and found["b"][1][1] == 1.5 and found[3].tolist() == [3, 3]


@pytest.mark.parametrize("nothing", [None, float("nan"), torch.tensor(float("nan")), {"other": 1}])
def test_a_rank_with_nothing_to_say_is_left_out(nothing: Any) -> None:
    found = on_worlds(lambda rank: weft.mean(nothing if rank == 1 else 0.1, weight=0 if rank == 1 else 7), 2)
    assert [float(value) for value in found] == pytest.approx([0.1, 0.1], abs=1e-8)
    assert found[0] == 0.1  # not 7 * 0.1 / 7, which is rounded


def test_a_rank_that_added_nothing_meets_the_tensors_of_others() -> None:
    """A total begins as 0, and is a tensor once something was added."""
    first, second = on_worlds(lambda rank: weft.sum(torch.tensor(2.5) if rank else 0), 2)
    assert first == 2.5 and torch.equal(second, torch.tensor(2.5))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (({"a": 1}, {"b": 1}), r"different forms.*rank 0: \{'a'.*rank 1: \{'b'"),
        ((torch.ones(2), torch.ones(3)), r"\[2\].*\[3\]"),
        ((torch.ones(2), torch.ones(2, dtype=torch.int64)), "float32.*int64"),
        ((None, None), "nothing to say|anything to say"),
        (("a", "b"), "no mean of this"),
    ],
)
def test_values_that_do_not_fit_are_told(values: tuple[Any, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        on_worlds(lambda rank: weft.mean(values[rank]), 2)


@pytest.mark.parametrize("value", [print, {1, 2}, torch.ones(2).to_sparse(), np.array(["a"]), 1j])
def test_what_cannot_travel_is_refused_in_one_process_too(value: Any) -> None:
    for call in (weft.mean, weft.sum, weft.gather, weft.broadcast):
        with pytest.raises(UsageError, match="cannot travel"):
            call(value)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "much"])
def test_a_weight_is_a_number_from_0_up(weight: Any) -> None:
    with pytest.raises(UsageError, match="weight is not a number from 0 up"):
        weft.mean(1.0, weight=weight)


# ---- values


def test_values_of_uneven_lengths_are_gathered() -> None:
    def script(rank: int) -> Any:
        rows = torch.full((rank, 2), rank, dtype=torch.bfloat16)
        return weft.gather(
            {"rows": rows, "list": ["r"] * rank, "array": np.arange(rank), "both": (rank, torch.tensor(rank))}
        )

    found = same(on_worlds(script, 3))
    assert torch.equal(found["rows"], torch.tensor([[1, 1], [2, 2], [2, 2]], dtype=torch.bfloat16))
    assert found["list"] == ["r"] * 3 and found["array"].tolist() == [0, 0, 1]
    assert found["both"][0] == [0, 1, 2] and found["both"][1].tolist() == [0, 1, 2]
    assert weft.gather(3) == [3] and weft.gather(torch.tensor(3)).tolist() == [3] and weft.gather([1, 2]) == [1, 2]


def test_a_rank_without_rows_does_not_need_their_shape() -> None:
    found = same(on_worlds(lambda rank: weft.gather(torch.ones(2, 3) if rank else torch.empty(0)), 2))
    assert torch.equal(found, torch.ones(2, 3))


def test_rows_of_different_shapes_are_told() -> None:
    with pytest.raises(UsageError, match=r"do not fit together \(rank 0: \(2, 1\).*rank 1: \(2, 2\)"):
        on_worlds(lambda rank: weft.gather(torch.ones(2, rank + 1)), 2)


@pytest.mark.parametrize("length", [3, 2000])
def test_one_rank_s_value_comes_to_all(length: int) -> None:
    value = {"text": "x" * length, "rows": torch.arange(length), "none": None, "pair": (1.5, [True])}
    found = on_worlds(lambda rank: weft.broadcast(value if rank == 1 else None, root=1), 3)
    same(found)
    assert found[0]["text"] == value["text"] and found[1] is value and found[2]["pair"] == (1.5, [True])
    with pytest.raises(UsageError, match=r"no such rank \(root: 1, ranks: 1\)"):
        weft.broadcast(value, root=1)


def test_calls_out_of_step_are_told() -> None:
    with pytest.raises(OutOfStepError, match=r"weft.mean.*weft.sum"):
        on_worlds(lambda rank: weft.mean(1) if rank else weft.sum(1), 2)


def test_the_end_of_an_epoch_that_is_due_comes_first() -> None:
    def script(rank: int) -> list[str]:
        noted = Noted()
        for call in (weft.barrier, lambda: weft.mean(1), lambda: weft.gather(1), lambda: weft.broadcast(1)):
            weft.distributed.script.world.world.find_world().owe_end(noted)
            call()
        return noted.notes

    assert on_worlds(script, 2) == [["end"] * 4] * 2


# ---- real processes


def ask_everything() -> list[Any]:
    own = torch.arange(weft.rank + 1, dtype=torch.bfloat16)
    weft.barrier()
    x, y = weft.share(torch.arange(5), torch.arange(10).view(5, 2)) if weft.is_first else weft.share()
    return [
        weft.mean({"a": weft.rank, "b": torch.tensor([1.5 * weft.rank])})["b"].tolist(),
        weft.gather(own).tolist(),
        weft.broadcast("x" * 2000 if weft.rank == 1 else None, root=1)[:3],
        x.tolist(),
        y.tolist(),
        *_train_on_a_stream(),
    ]


class Stream(IterableDataset[Tensor]):
    """Shuffles in its worker, where all ranks draw the same."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(13).double().unsqueeze(1))


def _train_on_a_stream() -> tuple[list[float], list[float]]:
    """The weights in the end, and the data as an evaluation saw it."""
    torch.manual_seed(3)
    model = nn.Linear(1, 1).double()
    loader: Any = DataLoader(Stream(), 4, num_workers=1, multiprocessing_context="fork")
    model, optimizer, loader = weft.weave(model, torch.optim.SGD(model.parameters(), lr=0.001), loader)
    for x in loader:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    seen = [x for (x,) in weft.evaluation(DataLoader(TensorDataset(torch.arange(13)), 4))]
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), weft.gather(torch.cat(seen)).tolist()


@pytest.mark.slow
def test_two_processes_ask_each_other() -> None:
    first, second = run_processes("tests.distributed.script.test_over_ranks:ask_everything", 2)
    assert first[:3] == second[:3] == [[0.75], [0.0, 0.0, 1.0], "xxx"]
    weights, seen = _train_on_a_stream()
    assert first[5] == second[5] == pytest.approx(weights, rel=1e-12) and first[6] == second[6] == seen
    assert (first[3], second[3]) == ([0, 1, 2], [3, 4]) and second[4] == [[6, 7], [8, 9]]
