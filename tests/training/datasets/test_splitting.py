"""Cutting one body of samples into parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.training.datasets.splitting import cut, fixed_order


@given(st.integers(50, 500), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_parts_join_to_the_whole(size: int, shares: list[int]) -> None:
    parts = cut(fixed_order(size), shares)
    assert torch.equal(torch.cat(parts), fixed_order(size))
    for part, share in zip(parts, shares, strict=True):
        assert abs(len(part) - size * share / sum(shares)) < len(shares) and len(part)


def test_official_sizes_come_out_exactly() -> None:
    assert [len(part) for part in cut(torch.arange(60_000), (11, 1))] == [55_000, 5_000]
    assert [len(part) for part in cut(torch.arange(50_000), (9, 1))] == [45_000, 5_000]


def test_a_part_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"too few samples .*samples: 9, parts: 9:1"):
        cut(torch.arange(9), (9, 1))
