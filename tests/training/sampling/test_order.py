"""Orders: pure, complete, fresh every epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import UsageError
from weft.training.sampling import AbstractOrder, Bucketed, Ordered, Shuffled, Weighted


def check_complete(order: AbstractOrder, epoch: int) -> None:
    """Every sample exactly once."""
    assert torch.equal(order.order(epoch).sort().values, torch.arange(len(order))), "samples are lost or repeated"


def check_fresh(order: AbstractOrder, num_epochs: int = 6) -> None:
    """A pure function of the epoch, and another order in every epoch."""
    orders = [order.order(epoch) for epoch in range(num_epochs)]
    for epoch, given_out in enumerate(orders):
        assert torch.equal(given_out, order.order(epoch)), "order depends on what was asked before"
    assert len({tuple(o.tolist()) for o in orders}) == num_epochs, "epochs repeat each other"


@given(st.integers(1, 300), st.integers(0, 2**32), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_orders_visit_every_sample_once(size: int, seed: int, epoch: int) -> None:
    lengths = (torch.arange(size) * 7) % 13
    for order in (Ordered(size), Shuffled(size, seed), Bucketed(lengths, min(8, size), seed)):
        check_complete(order, epoch)
    check_complete(Weighted(lengths + 1.0, seed, replacement=False), epoch)


def test_the_order_of_the_data_set_stays() -> None:
    assert Ordered(4).order(3).tolist() == [0, 1, 2, 3]


def test_random_orders_are_fresh_every_epoch() -> None:
    weights = torch.arange(1.0, 51.0)
    for order in (Shuffled(50, 1), Bucketed(torch.arange(50) % 5, 8, 1), Weighted(weights, 1)):
        check_fresh(order)
    check_fresh(Weighted(weights, 1, replacement=False))


def test_seeds_give_different_orders() -> None:
    assert not torch.equal(Shuffled(50, 1).order(0), Shuffled(50, 2).order(0))
    # Nor is one seed's next epoch another seed's first.
    assert not torch.equal(Shuffled(50, 1).order(1), Shuffled(50, 2).order(0))


class Reseeded(AbstractOrder):
    """Planted fault: Deep500's ShuffleSampler re-seeded at each reset, so every epoch had the same permutation."""

    def __len__(self) -> int:
        return 20

    def order(self, epoch: int) -> Tensor:
        return torch.randperm(20, generator=torch.Generator().manual_seed(1))


class Running(AbstractOrder):
    """Planted fault: a running generator, which a resume cannot wind back."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 20

    def order(self, epoch: int) -> Tensor:
        return torch.randperm(20, generator=self._generator)


class Lossy(AbstractOrder):
    """Planted fault: Deep500's PartitionedDataset dropped the remainder."""

    def __len__(self) -> int:
        return 20

    def order(self, epoch: int) -> Tensor:
        return torch.arange(18)


def test_the_checks_catch_planted_faults() -> None:
    with pytest.raises(AssertionError, match="epochs repeat"):
        check_fresh(Reseeded())
    with pytest.raises(AssertionError, match="asked before"):
        check_fresh(Running())
    with pytest.raises(AssertionError, match="lost"):
        check_complete(Lossy(), 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 20), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_buckets_hold_neighbours_in_length(lengths: list[int], batch_size: int, epoch: int) -> None:
    lengths_n = torch.tensor(lengths)
    batches = lengths_n[Bucketed(lengths_n, batch_size, seed=3).order(epoch)].split(batch_size)
    # Batches are pieces of the sorted lengths: laid end to end they are sorted again, so no two overlap.
    pieces = sorted((sorted(batch.tolist()) for batch in batches), key=lambda piece: (piece[0], piece[-1]))
    assert [length for piece in pieces for length in piece] == sorted(lengths)


def test_buckets_save_most_of_the_padding() -> None:
    lengths = Shuffled(1000, 1).order(0) % 100 + 1

    def padding(order: AbstractOrder) -> int:
        return sum(int((batch.max() - batch).sum()) for batch in lengths[order.order(0)].split(32))

    assert padding(Bucketed(lengths, 32, seed=1)) < 0.1 * padding(Shuffled(1000, 1))


def test_batches_of_all_lengths_are_mixed_and_the_short_one_is_last_and_changes() -> None:
    lengths = torch.arange(50)
    orders = [Bucketed(lengths, 8, seed=1).order(epoch) for epoch in range(10)]
    first_means = [float(lengths[order[:8]].float().mean()) for order in orders]
    assert min(first_means) < 15 and max(first_means) > 35
    assert len({tuple(order[-2:].tolist()) for order in orders}) > 3


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_are_honoured(replacement: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    order = Weighted(weights, seed=1, num_samples=2000 if replacement else 1, replacement=replacement)
    num_epochs = 1 if replacement else 2000
    counts = torch.cat([order.order(epoch) for epoch in range(num_epochs)]).bincount(minlength=4)
    expected = 2000 * weights / weights.sum()
    deviation = (expected * (1 - weights / weights.sum())).sqrt()
    assert counts[0] == 0
    assert bool(((counts - expected).abs() <= 4 * deviation).all())


def test_the_number_of_samples_in_an_epoch_can_be_chosen() -> None:
    weights = torch.ones(5)
    assert len(Weighted(weights, 1).order(0)) == 5
    assert len(Weighted(weights, 1, num_samples=12).order(0)) == 12
    assert len(Weighted(weights, 1, num_samples=3, replacement=False).order(0).unique()) == 3


@pytest.mark.parametrize(
    ("weights", "num_samples", "replacement", "text"),
    [
        ([1.0, -1.0], None, True, "weight: -1.0"),
        ([1.0, float("nan")], None, True, "weight: nan"),
        ([1.0, float("inf")], None, True, "weight: inf"),
        ([0.0, 0.0], None, True, "num_samples: 2, found: 0"),
        ([1.0, 0.0], None, False, "num_samples: 2, found: 1"),
        ([1.0, 1.0], 3, False, "num_samples: 3, found: 2"),
        ([1.0, 1.0], 0, True, "num_samples: 0"),
    ],
)
def test_impossible_weights_are_refused(
    weights: list[float], num_samples: int | None, replacement: bool, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        Weighted(torch.tensor(weights), 1, num_samples, replacement)
