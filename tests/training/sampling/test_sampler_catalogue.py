"""Samplers as a recipe names them."""

import pytest
import torch

from weft.errors import RecipeError, UsageError
from weft.training.component import Component, build
from weft.training.datasets import ArrayDataset, SequenceDataset
from weft.training.sampling import SAMPLERS, Sampler, SamplerState

UNBALANCED = ArrayDataset(torch.zeros(1000, 2), (torch.arange(1000) % 10 == 0).long())


def epoch_of(sampler: Sampler) -> torch.Tensor:
    state, batches = SamplerState(), []
    while state.epoch == 0:
        indices, state = sampler.next_batch(state)
        batches.append(indices)
    return torch.cat(batches)


def make(component: Component, dataset: ArrayDataset | SequenceDataset = UNBALANCED, batch_size: int = 100) -> Sampler:
    return build(component, SAMPLERS, "sampler", dataset, batch_size, 1)


def test_every_sampler_but_the_bucketed_fits_a_classification_set() -> None:
    for name in sorted(set(SAMPLERS) - {"bucketed"}):
        assert len(epoch_of(make(Component(name)))) == 1000
        assert make(Component(name, drop_last=True), batch_size=300).num_samples == 900


def test_ordered_and_shuffled_take_every_sample() -> None:
    assert epoch_of(make(Component("ordered"))).tolist() == list(range(1000))
    shuffled = epoch_of(make(Component("shuffled"))).tolist()
    assert sorted(shuffled) == list(range(1000)) != shuffled


def test_bucketed_batches_are_padded_little() -> None:
    dataset = SequenceDataset([torch.arange(2 + place * 7 % 30) for place in range(60)])
    sampler = make(Component("bucketed"), dataset, batch_size=10)
    for batch in epoch_of(sampler).split(10):
        lengths = dataset.lengths()[batch]
        assert int(lengths.max() - lengths.min()) <= 5


def test_weighted_balances_classes_unless_told() -> None:
    classes = UNBALANCED.labels()
    assert classes is not None
    balanced = classes[epoch_of(make(Component("weighted")))].float().mean()
    assert abs(float(balanced) - 0.5) < 0.06  # four standard deviations of a mean of 1000
    only_rare = make(Component("weighted", class_weights=(0, 1), num_samples=100))
    assert bool((classes[epoch_of(only_rare)] == 1).all())
    once = make(Component("weighted", class_weights=(0, 1), num_samples=100, replacement=False))
    assert len(epoch_of(once).unique()) == 100


def test_samplers_refuse_data_that_they_cannot_order() -> None:
    with pytest.raises(UsageError, match="no lengths"):
        make(Component("bucketed"))
    with pytest.raises(UsageError, match="no classes"):
        make(Component("weighted"), ArrayDataset(torch.zeros(200, 1), torch.zeros(200, 1)))
    with pytest.raises(UsageError, match="class: 1, class_weights: 1"):
        make(Component("weighted", class_weights=(1.0,)))
    for name in ("ordered", "shuffled", "weighted"):
        with pytest.raises(UsageError, match="empty"):
            make(Component(name), ArrayDataset(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)))


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(RecipeError, match="did you mean 'drop_last'"):
        make(Component("shuffled", drop_lest=True))
