"""Sparse sums on real processes, over shared memory and sockets."""

from collections.abc import Generator

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.sparse_sums.running import make_quantiser, make_stream
from tests.processes.ranks import run_processes
from weft.distributed.codecs import ReductionWork
from weft.distributed.codecs.sparse_sums import SPARSE_ALGORITHMS, SparseStream, sum_sparse
from weft.distributed.group.calls import Call
from weft.distributed.place import Kind, find_launch, open_group

LENGTH = 400_000  # whose messages are larger than any buffer on the way


def make_streams(size: int) -> list[SparseStream]:
    return [make_stream(torch.arange(rank, LENGTH, 3 + rank), LENGTH, seed=rank) for rank in range(size)]


def add_by_every_algorithm(kinds: list[Kind]) -> list[list[float]]:
    """The rank program: all sums at once over each kind of group; of each its distance from the exact one, and a number
    that tells its bits."""
    found = []
    for generation, kind in enumerate(kinds):
        group = open_group(find_launch(), kind, timeout=30, generation=generation)
        streams = make_streams(group.size)
        exact = sum(stream.to_dense() for stream in streams)

        def dense(
            number: int, rank: int = group.rank, own: SparseStream = streams[group.rank], size: int = group.size
        ) -> Generator[Call | tuple[Call, ...], None, Tensor]:
            by = SPARSE_ALGORITHMS[number % 4]
            quantiser = make_quantiser(8) if number == 7 else None
            total = yield from sum_sparse(rank, size, own, by, quantiser=quantiser, tag=number)
            return total.to_dense()

        works = [ReductionWork(group, dense(number)) for number in range(8)]
        for total in [work.wait() for work in works]:
            weights = torch.arange(LENGTH) % 1001
            found.append([float((total - exact).abs().max()), float((total.double() * weights).sum())])
        group.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_real_processes_have_the_exact_sum_and_the_same_bits(size: int) -> None:
    path = "tests.distributed.codecs.sparse_sums.test_processes:add_by_every_algorithm"
    kinds = ["shared_memory", "torch"]
    first, *others = run_processes(path, size, kinds=kinds)
    assert all(other == first for other in others)
    distances = [distance for distance, _ in first]
    assert distances[:7] == [0.0] * 7 and distances[8:15] == [0.0] * 7
    assert 0 < distances[7] == distances[15] < 8
