"""Random sizes against a plain reference, on every kind that lives in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.group.test_contract import KINDS, run_solo
from tests.distributed.group.test_hierarchical import run_hosts
from weft.distributed.group import AbstractGroup

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6)
TABLES = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=n, max_size=n)
)


def run_all(program: Callable[[AbstractGroup], Any], size: int) -> list[list[Any]]:
    """The results of the ranks, on each kind that can have so many."""
    runs = [run(program, size) for run in KINDS.values()]
    runs += [run_hosts(program, size, ranks_per_host=each) for each in (1, 2, 3) if size % each == 0]
    return [*runs, run_solo(program, 1)] if size == 1 else runs


def numbers(rank: int, rows: int) -> Tensor:
    """Of two columns, and different everywhere; sums are exact."""
    return (torch.arange(2.0 * rows) + 1000 * rank).view(rows, 2)


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_all_gather_is_a_concatenation(lengths: list[int]) -> None:
    sizes = tuple(lengths)
    wanted = torch.cat([numbers(rank, rows) for rank, rows in enumerate(sizes)])

    def program(group: AbstractGroup) -> Tensor:
        output = torch.full_like(wanted, -1)
        group.all_gather(output, numbers(group.rank, sizes[group.rank]), sizes)
        return output

    assert all(torch.equal(output, wanted) for outputs in run_all(program, len(sizes)) for output in outputs)


@settings(max_examples=25, deadline=None)
@given(SIZES)
def test_reduce_scatter_is_a_slice_of_the_sum(lengths: list[int]) -> None:
    sizes = tuple(lengths)
    total = torch.stack([numbers(rank, sum(sizes)) for rank in range(len(sizes))]).sum(0)

    def program(group: AbstractGroup) -> Tensor:
        output = torch.full((sizes[group.rank], 2), -1.0)
        group.reduce_scatter(output, numbers(group.rank, sum(sizes)), sizes=sizes)
        return output

    for outputs in run_all(program, len(sizes)):
        assert torch.equal(torch.cat(outputs), total)
        assert [len(output) for output in outputs] == lengths


@settings(max_examples=25, deadline=None)
@given(TABLES)
def test_all_to_all_is_a_transposition(table: list[list[int]]) -> None:
    inputs = [numbers(rank, sum(row)).split(row) for rank, row in enumerate(table)]

    def program(group: AbstractGroup) -> Tensor:
        sends, recvs = tuple(table[group.rank]), tuple(row[group.rank] for row in table)
        output = torch.full((sum(recvs), 2), -1.0)
        group.all_to_all(output, torch.cat(inputs[group.rank]), sends, recvs)
        return output

    for outputs in run_all(program, len(table)):
        for rank, output in enumerate(outputs):
            assert torch.equal(output, torch.cat([parts[rank] for parts in inputs]))


@pytest.mark.parametrize("size", [3, 5])
def test_sums_keep_the_order_of_ranks(size: int) -> None:
    """As the equal call does, to the bit: numbers whose sum depends on the order."""
    tensors = torch.randn(size, 4 * size, generator=torch.Generator().manual_seed(1))
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    sizes = (4 * size - 3, *(0,) * (size - 2), 3)

    def program(group: AbstractGroup) -> Tensor:
        output = torch.empty(sizes[group.rank])
        group.reduce_scatter(output, tensors[group.rank].clone(), sizes=sizes)
        return output

    for run in KINDS.values():
        assert torch.equal(torch.cat(run(program, size)), total)
