"""The training loader: every rank its share of one process's batches, whatever the loader."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

import weft
from tests.distributed.script.virtual_script import run_script
from tests.distributed.script.worlds import Noted, on_worlds
from weft.distributed.script.data.cutting import few_of, part_of
from weft.distributed.script.data.loaders import TrainingLoader, check_loader
from weft.distributed.script.world.world import find_world
from weft.errors import OutOfStepError, UsageError

Batches = list[list[int]]


class Stream(IterableDataset[int]):
    """Numbers from 0, shuffled or not, in parts where there are workers."""

    def __init__(self, length: int | None, is_shuffled: bool = False) -> None:
        self.length, self.is_shuffled = length, is_shuffled

    def __iter__(self) -> Iterator[int]:
        if self.length is None:
            return itertools.count()
        info = get_worker_info()
        numbers = list(range(self.length))[info.id if info else 0 :: info.num_workers if info else 1]
        if self.is_shuffled:
            random.shuffle(numbers)
        return iter(numbers)


class Named(Dataset[int]):
    """Its samples have names, and pairs of names."""

    def __getitem__(self, key: tuple[str, int]) -> int:
        return ord(key[0]) * key[1]


class Pairs:
    """A batch sampler of keys that are no numbers."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        return iter([[("a", 1), ("b", 2)], [("c", 3)]])


class Endless:
    """Batches of indices for ever, drawn one by one."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(12, (3,)).tolist()


def numbers(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(13)), **{"batch_size": 4, **options})


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: numbers(),
    "shuffled": lambda: numbers(shuffle=True),
    "dropped last": lambda: numbers(shuffle=True, drop_last=True),
    "own generator": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(3)),
    "batch sampler": lambda: DataLoader(
        TensorDataset(torch.arange(13)), batch_sampler=BatchSampler(RandomSampler(range(13)), 5, drop_last=False)
    ),
    "keys": lambda: DataLoader(Named(), batch_sampler=Pairs()),
    "collated": lambda: numbers(shuffle=True, collate_fn=lambda samples: torch.stack([x for (x,) in samples]) * 2),
    "no length": lambda: DataLoader(TensorDataset(torch.arange(12)), batch_sampler=Endless()),
    "items": lambda: DataLoader(TensorDataset(torch.arange(20).view(5, 4)), batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(13), 4),
    "stream, dropped last": lambda: DataLoader(Stream(13), 4, drop_last=True),
    "endless stream": lambda: DataLoader(Stream(None), 5),
    "stream of batches": lambda: DataLoader(torch_stream([torch.arange(5), torch.arange(5, 8)]), batch_size=None),
}


def torch_stream(batches: list[Tensor]) -> IterableDataset[Tensor]:
    class Ready(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(batches)

    return Ready()


def flat(batch: Any) -> list[int]:
    found: list[int] = (batch[0] if isinstance(batch, list) else batch).tolist()
    return found


def epochs_of(loader: Any, most: int = 5) -> list[Batches]:
    return [[flat(batch) for batch in itertools.islice(loader, most)] for _ in range(2)]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_put_together_are_the_batches_of_one_process(name: str, size: int) -> None:
    torch.manual_seed(5)
    expected = epochs_of(LOADERS[name]())

    def script(rank: int) -> list[list[tuple[list[int], float]]]:
        torch.manual_seed(5 if rank == 0 else rank)
        random.seed(rank)
        noted = Noted()
        loader = TrainingLoader(LOADERS[name](), find_world(), noted)
        return [[(flat(b), noted.share.weight) for b in itertools.islice(loader, 5)] for _ in range(2)]

    results = on_worlds(script, size)
    for epoch, batches in enumerate(expected):
        for number, batch in enumerate(batches):
            shares = [result[epoch][number] for result in results]
            assert [i for own, weight in shares if weight for i in own] == batch
            assert [weight for _, weight in shares] == [
                part_of(len(batch), r, size)[1] / len(batch) for r in range(size)
            ]
            assert all(len(own) == 1 for own, weight in shares if not weight)
        assert {len(result[epoch]) for result in results} == {len(batches)}


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_of_a_batch_are_a_partition(length: int, size: int) -> None:
    parts = [part_of(length, rank, size) for rank in range(size)]
    assert [i for own, count in parts if count for i in range(length)[own]] == list(range(length))
    assert all(own.stop - own.start == max(count, 1) for own, count in parts)
    assert max(count for _, count in parts) - min(count for _, count in parts) <= 1


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("data", ["map", "stream"])
def test_workers_fetch_ahead_what_one_process_fetches(data: str, is_persistent: bool) -> None:
    """A stream that shuffles in its workers does so alike on all ranks."""

    def loader() -> DataLoader[Any]:
        dataset: Any = TensorDataset(torch.arange(13)) if data == "map" else Stream(13, is_shuffled=True)
        return DataLoader(
            dataset,
            4,
            shuffle=True if data == "map" else None,
            num_workers=2,
            persistent_workers=is_persistent,
            multiprocessing_context="fork",
        )

    torch.manual_seed(5)
    plain = loader()
    expected = epochs_of(plain)

    def script(rank: int) -> list[Batches]:
        torch.manual_seed(5 if rank == 0 else 9)
        return epochs_of(TrainingLoader(loader(), find_world(), Noted()))

    first, second = on_worlds(script, 2)
    joined = [[a + b for a, b in zip(*batches, strict=True)] for batches in zip(first, second, strict=True)]
    assert [
        [b[: len(e)] for b, e in zip(*pair, strict=True)] for pair in zip(joined, expected, strict=True)
    ] == expected


def test_streams_that_differ_between_ranks_are_refused() -> None:
    def script(rank: int) -> None:
        random.seed(rank)
        list(TrainingLoader(DataLoader(Stream(13, is_shuffled=True), 4), find_world(), Noted()))

    with pytest.raises(UsageError, match=r"different streams \(batch: 1, ranks: 0 and 1\).*num_workers=1"):
        on_worlds(script, 2)


def test_data_of_different_lengths_is_told() -> None:
    def script(rank: int) -> None:
        list(TrainingLoader(DataLoader(TensorDataset(torch.arange(10 + rank)), 4), find_world(), Noted()))

    with pytest.raises(OutOfStepError, match=r"samples.*10.*11"):
        on_worlds(script, 2)


@pytest.mark.parametrize("name", ["stream", "no length", "items", "batch sampler"])
def test_a_model_trains_on_any_loader_as_in_one_process(name: str) -> None:
    def script() -> list[float]:
        torch.manual_seed(5)
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, loader = weft.weave(model, optimizer, LOADERS[name]())
        for _ in range(2):
            for batch in itertools.islice(loader, 5):
                x = torch.as_tensor(flat(batch)).double().unsqueeze(1)
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    alone = run_script(script, 1)[0]
    for found in run_script(script, 3):
        assert found == pytest.approx(alone, rel=1e-12)


# ---- epochs


def test_an_epoch_begins_and_ends_once() -> None:
    def script(rank: int) -> list[str]:
        noted = Noted()
        loader = TrainingLoader(numbers(), find_world(), noted)
        for _ in range(2):
            for _ in loader:
                noted.notes.append("batch")
        return noted.notes

    assert on_worlds(script, 2) == [["begin", *["batch"] * 4, "end"] * 2] * 2


def test_the_end_of_an_epoch_that_was_left_waits_for_the_next_call_of_all_ranks() -> None:
    """Rank 1 fails alone in its loop and goes on: nothing was sent when its iterator was closed."""

    def script(rank: int) -> list[str]:
        noted, world = Noted(), find_world()
        loader = TrainingLoader(numbers(), world, noted)
        try:
            for _ in loader:
                if rank == 1:
                    raise ValueError
                break
        except ValueError:
            noted.notes.append("failed")
        notes = list(noted.notes)
        world.settle()
        world.settle()
        return [*notes, "settled", *noted.notes[len(notes) :]]

    assert on_worlds(script, 2) == [["begin", "settled", "end"], ["begin", "failed", "settled", "end"]]


def test_an_iterator_that_is_closed_late_leaves_the_next_epoch_alone() -> None:
    loader = TrainingLoader(numbers(), find_world(), Noted())
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    del old
    assert loader.state_dict()["batches"] == 1
    assert [flat(batch) for batch in new] == [[4, 5, 6, 7], [8, 9, 10, 11], [12]]


def test_a_late_rank_takes_a_few_samples_that_count_for_nothing() -> None:
    noted = Noted(late=(False, True, True))
    loader = TrainingLoader(numbers(), find_world(), noted)
    found = [(flat(batch), noted.share.weight) for batch in loader]
    assert found == [([0, 1, 2, 3], 1.0), ([4, 5], 0.0), ([8, 9], 0.0), ([12], 1.0)]


@pytest.mark.parametrize(
    ("batch", "few"),
    [
        ((torch.arange(5), {"names": list("abcde")}), (2, {"names": list("ab")})),
        ([torch.zeros(5, 8, 8)] * 5, [5] * 5),  # images of five channels, it may be
        ((torch.zeros(5), torch.tensor(0.1)), None),
        ((torch.zeros(5), object()), None),
    ],
)
def test_a_few_of_a_batch_are_cut_where_its_samples_show(batch: Any, few: Any) -> None:
    found = few_of(batch, 5)
    if few is None:
        assert found is batch
    else:
        assert tree_map(lambda item: len(item) if isinstance(item, torch.Tensor) else item, found) == few


def test_two_iterations_at_a_time_do_not_disturb_each_other() -> None:
    def script(rank: int) -> list[Any]:
        loader = TrainingLoader(numbers(shuffle=True), find_world(), Noted())
        return [(flat(a), flat(b)) for a, b in zip(loader, loader, strict=False)]

    first, second = on_worlds(script, 2)
    for column in range(2):
        seen = [i for result in (first, second) for pair in result for i in pair[column]]
        assert set(seen) == set(range(13))


def test_batches_are_weighed_by_what_a_function_counts() -> None:
    def script(rank: int) -> list[float]:
        noted = Noted(weight=lambda batch: (batch[0] % 3 == 0).sum())
        return [noted.share.weight for _ in TrainingLoader(numbers(), find_world(), noted)]

    # 0 1 | 2 3    4 5 | 6 7    8 9 | 10 11    12 | stands in for none
    assert on_worlds(script, 2) == [[0.5, 0.0, 1.0, 1.0], [0.5, 1.0, 0.0, 0.0]]


def test_a_weight_that_is_no_count_is_refused() -> None:
    noted = Noted(weight=lambda batch: -1)
    with pytest.raises(UsageError, match=r"not a number from 0 up \(weight: -1"):
        list(TrainingLoader(numbers(), find_world(), noted))


# ---- as a DataLoader


def test_it_has_the_attributes_of_the_script_s_loader() -> None:
    plain = numbers(shuffle=True)
    loader = TrainingLoader(plain, find_world(), Noted())
    assert len(loader) == 4 and loader.dataset is plain.dataset and loader.sampler is plain.sampler
    assert (loader.batch_size, loader.num_workers, loader.collate_fn) == (4, 0, plain.collate_fn)
    with pytest.raises(AttributeError):
        _ = loader.batches
    with pytest.raises(AttributeError):
        loader.collate_fn = list  # type: ignore[attr-defined]  # would be lost on the loader behind


def test_what_cannot_be_shared_is_refused() -> None:
    loader = TrainingLoader(numbers(), find_world(), Noted())
    with pytest.raises(UsageError, match="woven already"):
        check_loader(loader)
    with pytest.raises(UsageError, match=r"not a DataLoader \(type: list\).*weft.share"):
        check_loader([1, 2])
    sampler: Any = DistributedSampler(TensorDataset(torch.arange(13)), num_replicas=2, rank=0)
    for twice in (numbers(sampler=sampler), numbers(batch_size=1, batch_sampler=BatchSampler(sampler, 2, True))):
        with pytest.raises(UsageError, match="shared twice"):
            check_loader(twice)

    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (2 * batch for (batch,) in super().__iter__())

    with pytest.raises(UsageError, match=r"__iter__ of its own.*Doubled.*collate_fn.*weft\.share"):
        check_loader(Doubled(TensorDataset(torch.arange(13)), 4))


# ---- positions


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "no length"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_an_epoch_is_resumed_on_any_number_of_ranks(name: str, before: int, after: int) -> None:
    torch.manual_seed(5)
    loader = LOADERS[name]()
    expected = epochs_of(loader)
    done = 1 if name in ("keys", "stream of batches") else 2

    def save(rank: int) -> tuple[dict[str, Any], Tensor]:
        torch.manual_seed(5)
        loader = TrainingLoader(LOADERS[name](), find_world(), Noted())
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        return loader.state_dict(), torch.get_rng_state()

    state, rng = on_worlds(save, before)[0]

    def go_on(rank: int) -> list[Batches]:
        torch.manual_seed(77)
        loader = TrainingLoader(LOADERS[name](), find_world(), Noted())
        loader.load_state_dict(state)
        torch.set_rng_state(rng)
        assert loader.state_dict()["batches"] == done
        left = [flat(batch) for batch in itertools.islice(loader, 5 - done)]
        if rank == 0:
            assert torch.equal(torch.get_rng_state(), rng)
        return [left, [flat(batch) for batch in itertools.islice(loader, 5)]]

    results = on_worlds(go_on, after)
    for epoch, batches in enumerate([expected[0][done:], expected[1]]):
        for number, batch in enumerate(batches):
            assert [i for r in results for i in r[epoch][number]][: len(batch)] == batch


@pytest.mark.parametrize("name", ["shuffled", "stream"])
def test_an_epoch_may_be_interrupted_again_and_again(name: str) -> None:
    # Regression: the batches of a resumed epoch were counted from where it was resumed.
    torch.manual_seed(5)
    expected = [flat(batch) for batch in LOADERS[name]()]
    torch.manual_seed(5)
    found: Batches = []
    state: dict[str, Any] | None = None
    for _ in range(4):
        loader = TrainingLoader(LOADERS[name](), find_world(), Noted())
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        found.append(flat(next(batches)))
        state = loader.state_dict()
    assert found == expected and state is not None and state["batches"] == 4


def test_a_position_after_the_last_batch_leaves_nothing_of_the_epoch() -> None:
    loader = TrainingLoader(numbers(), find_world(), Noted())
    states = [loader.state_dict() for _ in loader]
    between = loader.state_dict()
    loader.load_state_dict(states[-1])
    assert (len(list(loader)), len(list(loader))) == (0, 4)
    loader.load_state_dict(between)
    assert len(list(loader)) == 4 and between["epoch"] == 1


def test_a_loader_without_length_has_no_position() -> None:
    loader = TrainingLoader(LOADERS["no length"](), find_world(), Noted())
    batches = iter(loader)
    next(batches)
    with pytest.raises(UsageError, match="no length"):
        loader.state_dict()
