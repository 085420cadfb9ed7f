"""Bias of labels, order of samples, and epochs that repeat."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.metrics.sampling import dataset_bias, epoch_correlation, sampler_order

indices = st.lists(st.integers(0, 20), max_size=40)


def test_balanced_labels_have_no_bias() -> None:
    bias = dataset_bias(torch.arange(100) % 10)
    assert bias.distance == pytest.approx(0, abs=1e-12)
    assert bias.counts == (10,) * 10


def test_one_class_only_is_as_far_as_it_gets() -> None:
    assert dataset_bias([0] * 7, num_classes=4).distance == 0.75


def test_a_class_without_samples_is_counted_when_it_is_known() -> None:
    assert dataset_bias([0, 1]).distance == 0.0
    assert dataset_bias([0, 1], num_classes=4) == dataset_bias([1, 0], num_classes=4)
    assert dataset_bias([0, 1], num_classes=4).counts == (1, 1, 0, 0)
    assert dataset_bias([0, 1], num_classes=4).distance == 0.5


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_bias_is_the_least_share_of_labels_to_change(labels: list[int]) -> None:
    bias = dataset_bias(labels, num_classes=5)
    too_many = sum(max(0.0, count - len(labels) / 5) for count in bias.counts)
    assert sum(bias.counts) == len(labels)
    assert bias.distance == pytest.approx(too_many / len(labels), abs=1e-12)
    assert 0 <= bias.distance <= 0.8 + 1e-12


@pytest.mark.parametrize(("labels", "classes"), [([], None), ([-1, 0], None), ([0, 3], 3)])
def test_labels_that_are_none_are_refused(labels: list[int], classes: int | None) -> None:
    with pytest.raises(UsageError, match="label"):
        dataset_bias(labels, classes)


@pytest.mark.parametrize(
    ("order", "expected"),
    [([], 0), ([5], 0), ([2, 2], 0), ([0, 1], 0), ([1, 0], 1), ([0, 0, 1], 0), ([1, 0, 0], 1), ([0, 2, 1], 1 / 3)],
)
def test_small_orders(order: list[int], expected: float) -> None:
    assert sampler_order(order) == pytest.approx(expected, abs=1e-12)


@given(indices)
def test_order_is_the_share_of_descending_pairs(order: list[int]) -> None:
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :] if a != b]
    expected = sum(a > b for a, b in pairs) / len(pairs) if pairs else 0.0
    assert sampler_order(order) == pytest.approx(expected, abs=1e-9)


@given(indices)
def test_sorting_and_turning_round(order: list[int]) -> None:
    assert sampler_order(sorted(order)) == pytest.approx(0, abs=1e-9)
    if len(set(order)) > 1:
        assert sampler_order(order[::-1]) == pytest.approx(1 - sampler_order(order), abs=1e-9)


def test_a_shuffled_order_is_near_one_half() -> None:
    assert sampler_order(torch.randperm(100_000)) == pytest.approx(0.5, abs=0.01)


def test_fresh_shuffles_are_not_linked() -> None:
    assert epoch_correlation([torch.randperm(2000) for _ in range(4)]) < 0.15


def test_the_same_order_every_epoch_is_seen() -> None:
    order = torch.randperm(1000)
    assert epoch_correlation([torch.randperm(1000), order, order]) == pytest.approx(1)
    assert epoch_correlation([range(10), range(10)]) == pytest.approx(1)
    assert epoch_correlation([range(10), range(10)[::-1]]) == pytest.approx(1)


def test_a_shuffle_seeded_anew_each_epoch_is_seen() -> None:
    # Deep500's ShuffleSampler set the same seed at every reset and shuffled what the last epoch had left: one
    # permutation composed with itself. No two epochs are alike, yet nothing is random after the first.
    epochs = []
    order = np.arange(1000)
    for _ in range(4):
        np.random.default_rng(7).shuffle(order)
        epochs.append(order.copy())
    assert epoch_correlation(epochs[:2]) < 0.15
    assert epoch_correlation(epochs) == pytest.approx(1)


def test_draws_with_replacement_can_be_compared() -> None:
    draws = [torch.randint(0, 50, (2000,)) for _ in range(3)]
    assert epoch_correlation(draws) < 0.15
    assert epoch_correlation([draws[0], draws[1], draws[0]]) == pytest.approx(1)


def test_one_index_all_along_repeats() -> None:
    assert epoch_correlation([[3, 3, 3], [3, 3, 3]]) == 1.0


@pytest.mark.parametrize("epochs", [[], [[0, 1]], [[0, 1], [0, 1, 2]], [[0], [0]]])
def test_epochs_that_cannot_be_compared_are_refused(epochs: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="cannot be compared"):
        epoch_correlation(epochs)
