"""Keyed random numbers: pure, uniform, independent of each other."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.training.datasets.draws import draws, permutation, uniform


def test_first_draws_never_change() -> None:
    # Splits and orders of old records can be made again only as long as these stand.
    assert hex(int(draws(0)[0])) == "0xe220a8397b1dcdaf"  # the published first output of SplitMix64 from 0
    assert permutation(6, 1, 2).tolist() == [5, 1, 4, 3, 0, 2]


@given(st.integers(-(2**63), 2**70), st.integers(0, 10**6), st.integers(1, 50))
@settings(max_examples=30, deadline=None)
def test_a_draw_depends_on_its_key_alone(seed: int, epoch: int, size: int) -> None:
    together = draws(seed, epoch, torch.arange(size))
    alone = np.concatenate([draws(seed, epoch, index) for index in range(size)])
    assert np.array_equal(together, alone)


@given(st.integers(0, 300), st.integers(0, 2**63))
@settings(max_examples=30, deadline=None)
def test_a_permutation_has_every_number_once(size: int, seed: int) -> None:
    assert torch.equal(permutation(size, seed).sort().values, torch.arange(size))


def test_uniform_numbers_fill_the_unit_interval_evenly() -> None:
    values = uniform(5, torch.arange(20_000))
    assert values.min() >= 0 and values.max() < 1
    counts = values.histc(bins=20, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_neighbouring_keys_are_not_correlated() -> None:
    index = torch.arange(20_000)
    streams = torch.stack([uniform(0, 0, index), uniform(0, 1, index), uniform(1, 0, index), uniform(0, 0, index, 1)])
    correlation = torch.corrcoef(streams) - torch.eye(4)
    assert correlation.abs().max() < 0.03  # four standard deviations of 1 / sqrt(20000)


def test_every_place_of_a_permutation_is_equally_likely() -> None:
    first = torch.stack([permutation(5, 9, epoch)[0] for epoch in range(2000)]).bincount(minlength=5)
    assert (first - 400).abs().max() < 80
