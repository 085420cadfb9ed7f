"""The choice of a sparse sum: the one that takes the least virtual time, and the same on all ranks."""

import math

import pytest
import torch

from tests.distributed.codecs.sparse_sums.running import make_stream, run_sum
from weft.distributed.codecs.sparse_sums import SPARSE_ALGORITHMS, Supports, choose_algorithm, forecast_sums
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel

LENGTH = 100_000
GIGABIT = Link(alpha=1e-4, beta=8e-9)


@pytest.mark.parametrize("size", [2, 4, 6, 16])
@pytest.mark.parametrize("density", [0.0001, 0.003, 0.03, 0.3])
def test_the_chosen_sum_is_within_a_tenth_of_the_fastest(size: int, density: float) -> None:
    num_entries = round(density * LENGTH)
    indices = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        indices.append(torch.randperm(LENGTH, generator=generator)[:num_entries].sort().values)
    streams = [make_stream(some, LENGTH) for some in indices]
    seconds = {by: max(run_sum(streams, by, network=NetworkModel(GIGABIT)).seconds) for by in SPARSE_ALGORITHMS}
    supports = Supports(LENGTH, num_entries)
    assert seconds[choose_algorithm(size, supports, GIGABIT)] <= 1.1 * min(seconds.values())
    for by, expected in forecast_sums(size, supports, GIGABIT).items():
        assert seconds[by] == pytest.approx(expected, rel=0.1)


def test_each_algorithm_has_its_place() -> None:
    """Few entries; sums that grow on few ranks; supports that overlap on many ranks; sums that fill up."""
    assert choose_algorithm(4, Supports(1_000_000, 100), GIGABIT) == "gather"
    assert choose_algorithm(4, Supports(1_000_000, 10_000), GIGABIT) == "recursive_doubling"
    assert choose_algorithm(64, Supports(10_000_000, 100_000, 100_000), GIGABIT) == "split_gather"
    assert choose_algorithm(8, Supports(1_000_000, 200_000), GIGABIT) == "dense_split_gather"


def test_a_measured_sum_may_change_the_choice() -> None:
    """Random supports of 3% fill up over 64 ranks; identical ones do not."""
    guess = Supports(1_000_000, 30_000)
    measured = Supports.measured(1_000_000, 30_000, 31_000, 64)
    assert math.isclose(measured.union(64), 31_000, rel_tol=1e-3)
    bits = 0.5
    assert choose_algorithm(64, guess, GIGABIT, gathered_bytes=bits) == "dense_split_gather"
    assert choose_algorithm(64, measured, GIGABIT, gathered_bytes=bits) == "split_gather"
