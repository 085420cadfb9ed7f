"""Costs of sparse sums: unions of supports, and bytes of the formulas against bytes that were sent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.codecs.sparse_sums.running import make_quantiser, make_stream, run_sum
from weft.planning.sparse_cost import SPARSE_ALGORITHMS, SparseAlgorithm, Supports, sparse_cost

LENGTH, PER_RANK = 8400, 280


@given(st.integers(1, 1000), st.integers(1, 64), st.floats(0, 1))
def test_the_sum_has_at_least_the_entries_of_one_and_at_most_those_of_all(per_rank: int, size: int, at: float) -> None:
    for positions in (per_rank, per_rank + at * 1000, None, math.inf):
        supports = Supports(2000, per_rank, positions)
        assert per_rank - 1e-3 <= supports.union(size) <= min(size * per_rank, 2000) + 1e-3
        assert supports.union(size) <= supports.union(size + 1)


def test_the_expected_union_is_that_of_random_supports() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(200):
        drawn = [torch.randperm(1000, generator=generator)[:50] for _ in range(8)]
        counts.append(len(torch.cat(drawn).unique()))
    assert Supports(1000, 50).union(8) == pytest.approx(sum(counts) / len(counts), rel=0.01)
    assert Supports(1000, 50).union(8) == pytest.approx(1000 * (1 - 0.95**8))


@given(st.integers(1, 500), st.integers(2, 64), st.floats(0, 1))
def test_a_measured_sum_is_found_again(per_rank: int, size: int, at: float) -> None:
    total = per_rank + at * (min(size * per_rank, 4000) - per_rank)
    assert Supports.measured(4000, per_rank, total, size).union(size) == pytest.approx(total, rel=1e-3)


def make_indices(kind: str, rank: int, size: int) -> torch.Tensor:
    """PER_RANK indices, equally many in every part of the range."""
    part, each = LENGTH // size, PER_RANK // size
    own = torch.arange(each) + (rank * each if kind == "disjoint" else 0)
    return torch.cat([own + begin for begin in range(0, LENGTH, part)])


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
@pytest.mark.parametrize("kind", ["identical", "disjoint"])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 7, 8, 14])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bytes_sent_are_those_of_the_formula(by: SparseAlgorithm, kind: str, size: int, dtype: torch.dtype) -> None:
    streams = [make_stream(make_indices(kind, rank, size), LENGTH, dtype) for rank in range(size)]
    positions = PER_RANK if kind == "identical" else math.inf
    cost = sparse_cost(by, size, Supports(LENGTH, PER_RANK, positions, dtype.itemsize))
    result = run_sum(streams, by)
    assert list(result.bytes_sent) == [address.bytes_sent for address in cost.addresses]
    if by != "dense_split_gather":  # whose gathering is a collective, which a recording group counts as one message
        assert [traffic.bytes_sent for *_, traffic in result.results] == list(result.bytes_sent)


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
@pytest.mark.parametrize("density", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_bytes_of_sums_that_fill_up_are_those_of_the_formula(by: SparseAlgorithm, density: float) -> None:
    num_entries, size = round(density * LENGTH), 4
    each = num_entries // size
    indices = torch.cat([torch.arange(each) + begin for begin in range(0, LENGTH, LENGTH // size)])
    streams = [make_stream(indices, LENGTH) for _ in range(size)]
    cost = sparse_cost(by, size, Supports(LENGTH, num_entries, num_entries))
    assert list(run_sum(streams, by).bytes_sent) == [address.bytes_sent for address in cost.addresses]


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
def test_bytes_of_random_supports_are_those_of_the_formula_but_for_chance(by: SparseAlgorithm) -> None:
    generator = torch.Generator().manual_seed(0)
    size, indices = 8, []
    for _ in range(size):
        indices.append(torch.randperm(LENGTH, generator=generator)[:PER_RANK].sort().values)
    result = run_sum([make_stream(some, LENGTH) for some in indices], by)
    cost = sparse_cost(by, size, Supports(LENGTH, PER_RANK))
    assert sum(result.bytes_sent) == pytest.approx(cost.total_bytes, rel=0.02)


def test_a_quantised_dense_phase_sends_what_its_quantiser_says() -> None:
    quantiser, size = make_quantiser(4, block=100), 4
    streams = [make_stream(make_indices("identical", rank, size), LENGTH) for rank in range(size)]
    cost = sparse_cost("dense_split_gather", size, Supports(LENGTH, PER_RANK), gathered_bytes=1.04)
    result = run_sum(streams, "dense_split_gather", quantiser=quantiser)
    assert result.bytes_sent == tuple(address.bytes_sent for address in cost.addresses)
