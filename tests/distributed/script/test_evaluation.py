"""Evaluation: ranks' shares are the data, each sample once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import weft
from tests.distributed.script.worlds import Noted, on_worlds
from weft.distributed.script.data.evaluation import block_of
from weft.distributed.script.data.loaders import TrainingLoader
from weft.distributed.script.world.world import find_world
from weft.errors import OutOfStepError, UsageError


class Count(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(13))


def numbers(length: int = 13, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), **{"batch_size": 4, **options})


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: numbers(),
    "shuffled": lambda: numbers(shuffle=True),
    "dropped last": lambda: numbers(shuffle=True, drop_last=True),
    "one batch": lambda: numbers(batch_size=20),
    "few samples": lambda: numbers(2),
    "no samples": lambda: numbers(0),
    "batch sampler": lambda: DataLoader(
        TensorDataset(torch.arange(13)), batch_sampler=Whole(SequentialSampler(range(13)), 3, drop_last=False)
    ),
    "items": lambda: DataLoader(TensorDataset(torch.arange(20).view(5, 4)), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Count(), 4),
    "workers": lambda: numbers(shuffle=True, num_workers=1, multiprocessing_context="fork"),
}


class Whole(BatchSampler):
    """Of a script's own: its batches belong together."""


def flat(batches: Any) -> list[int]:
    return [i for batch in batches for i in (batch[0] if isinstance(batch, list) else batch).tolist()]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_are_the_data_once_each_in_the_order_of_one_process(name: str, size: int) -> None:
    torch.manual_seed(5)
    expected = flat(LOADERS[name]())

    def script(rank: int) -> tuple[list[int], list[int]]:
        torch.manual_seed(5 if rank == 0 else rank)
        loader = weft.evaluation(LOADERS[name]())
        batches = list(loader)
        if name != "stream":
            assert len(loader) == len(batches)
        return flat(batches), weft.gather(flat(batches))

    results = on_worlds(script, size)
    if name == "stream":  # whose samples are shared batch by batch
        assert sorted(results[0][1]) == expected
    else:
        assert [gathered for _, gathered in results] == [expected] * size
    counts = [len(own) for own, _ in results]
    whole = {"batch sampler": 5, "items": 4, "stream": 4}.get(name, 1)
    assert max(counts) - min(counts) <= whole


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(1, 5))
def test_blocks_are_a_partition_that_ends_where_batches_do(sizes: list[int], num_ranks: int) -> None:
    samples = iter(range(100))
    batches = [list(itertools.islice(samples, size)) for size in sizes]
    blocks = [block_of(batches, rank, num_ranks) for rank in range(num_ranks)]
    assert [i for block in blocks for part in block for i in part] == list(range(sum(sizes)))
    assert all(part and any(set(part) <= set(batch) for batch in batches) for block in blocks for part in block)
    counts = [sum(map(len, block)) for block in blocks]
    assert max(counts) - min(counts) <= 1


def test_consensus_is_held_while_it_is_iterated_and_left_when_it_is_not() -> None:
    def script(rank: int) -> list[str]:
        noted = Noted()
        for _ in weft.evaluation(numbers()):
            noted.notes.append("batch")
            break
        return noted.notes

    assert on_worlds(script, 2) == [["enter", "batch", "leave"]] * 2


def test_it_settles_what_is_due_of_an_epoch_that_was_left() -> None:
    def script(rank: int) -> list[str]:
        noted = Noted()
        for _ in TrainingLoader(numbers(), find_world(), noted):
            break
        list(weft.evaluation(numbers()))
        return noted.notes

    assert on_worlds(script, 2) == [["begin", "end", "enter", "leave"]] * 2


def test_the_training_data_may_be_evaluated() -> None:
    def script(rank: int) -> list[int]:
        return flat(weft.evaluation(TrainingLoader(numbers(), find_world(), Noted())))

    assert on_worlds(script, 2) == [list(range(7)), list(range(7, 13))]


def test_attributes_are_those_of_the_script_s_loader() -> None:
    plain = numbers()
    assert weft.evaluation(plain).dataset is plain.dataset
    with pytest.raises(UsageError, match="not a DataLoader"):
        weft.evaluation([1])  # type: ignore[arg-type]


def test_data_of_different_lengths_is_told() -> None:
    with pytest.raises(OutOfStepError, match=r"samples.*13.*14"):
        on_worlds(lambda rank: list(weft.evaluation(numbers(13 + rank))), 2)
