"""The share of every rank: no overlap, no loss."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import UsageError
from weft.training.sampling import share

Share = Callable[[Tensor, int, int], Tensor]


def check_partition(share: Share, size: int, world_size: int) -> None:
    indices = torch.arange(size) * 3
    parts = [share(indices, rank, world_size) for rank in range(world_size)]
    together = torch.cat(parts)
    assert len(together.unique()) == len(together), "ranks overlap"
    assert torch.equal(together, indices), "samples are lost or out of order"
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1, "ranks have unequal work"


@given(st.integers(0, 500), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_ranks_share_a_batch_without_overlap_or_loss(size: int, world_size: int) -> None:
    check_partition(share, size, world_size)


def everything(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Planted fault: Deep500's DistributedSampler did not look at the rank."""
    return indices


def without_remainder(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Planted fault: Deep500's PartitionedDataset dropped what did not divide."""
    each = len(indices) // world_size
    return indices[rank * each : (rank + 1) * each]


def remainder_to_the_last(indices: Tensor, rank: int, world_size: int) -> Tensor:
    """Planted fault: the last rank takes all that is left, and the others wait for it."""
    each = len(indices) // world_size
    return indices[rank * each : (rank + 1) * each if rank < world_size - 1 else len(indices)]


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(everything, "overlap"), (without_remainder, "lost"), (remainder_to_the_last, "unequal")],
)
def test_the_check_catches_planted_faults(broken: Share, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_partition(broken, size=11, world_size=4)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_out_of_range_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(UsageError, match=f"rank: {rank}, world_size: {world_size}"):
        share(torch.arange(4), rank, world_size)
