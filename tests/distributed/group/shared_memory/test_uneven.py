"""Parts of different lengths over real processes: both engines keep the contract, the same bits, and tell misfits."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.group import contract, uneven_contract
from tests.distributed.group.findings import check_kind
from tests.distributed.group.shared_memory.test_collectives import FLOATS, INTEGERS, draw
from weft.distributed.group import AllGather, AllToAll, Call, ReduceScatter, Sizes, kill_this_process
from weft.distributed.group.dense import reduce_parts
from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.errors import UsageError

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_both_engines_keep_the_contract(run_ranks: Run, size: int, compiled: bool) -> None:
    def everything(group: SharedMemoryGroup) -> dict[str, Any]:
        reports = [program(group) for program in uneven_contract.PROGRAMS]
        problems = [problem for report in reports for problem in report["problems"]]
        return {"problems": problems, "digest": "".join(report["digest"] for report in reports)}

    check_kind(everything, lambda program, size: run_ranks(program, size, compiled=compiled), size)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.long)])
def test_a_reduction_has_the_bits_of_a_sum_in_rank_order(run_ranks: Run, size: int, compiled: bool) -> None:
    """One round, many, parts that end early, and one that is many times as long as the others."""
    shares: list[Sizes] = [(5, 0, 70_001, 3, 64), (400_000, 1, 129, 0, 63), (90_000,) * 5]

    def program(group: SharedMemoryGroup) -> list[str]:
        wrong = []
        for dtype, share in itertools.product([*FLOATS, *INTEGERS], shares):
            sizes = share[: group.size]
            tensors = torch.stack([draw(rank, sum(sizes), dtype) for rank in range(group.size)])
            output = torch.empty(sizes[group.rank], dtype=dtype)
            group.reduce_scatter(output, tensors[group.rank], sizes=sizes)
            if not torch.equal(output, reduce_parts(tensors, "sum").split(sizes)[group.rank]):
                wrong.append(f"{dtype} {sizes}")
        return wrong

    assert run_ranks(program, size, compiled=compiled) == [[]] * size


@pytest.mark.parametrize("collective", uneven_contract.COLLECTIVES)
def test_a_killed_rank_is_named(run_ranks: Run, collective: str, compiled: bool) -> None:
    lose = partial(contract.lose, collective=collective, die=kill_this_process)
    contract.check_loss(run_ranks(lose, 3, compiled=compiled), 3)


def calls_that_differ(rank: int) -> dict[str, Call]:
    """Each is right by itself, and the two ranks do not mean the same."""
    mine: Sizes = (1, 3) if rank == 0 else (2, 2)
    part, whole = torch.zeros(mine[rank]), torch.zeros(4)
    as_sender = AllToAll(torch.zeros(3), torch.zeros(3), (1, 2), (1, 2))
    as_receiver = AllToAll(torch.zeros(5), torch.zeros(4), (2, 2), (3, 2))
    return {
        "all_gather": AllGather(whole, part, mine),
        "reduce_scatter": ReduceScatter(part, whole, "sum", mine),
        "all_to_all": (as_sender, as_receiver)[rank],
        "equal": AllGather(whole, torch.zeros(2)) if rank == 0 else AllGather(whole, torch.zeros(2), (2, 2)),
    }


@pytest.mark.parametrize("name", calls_that_differ(0))
def test_sizes_that_ranks_do_not_share_are_told(run_ranks: Run, name: str, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> str:
        try:
            group.run(calls_that_differ(group.rank)[name])
        except UsageError as error:
            return str(error)
        return "no error"

    assert all("do not match" in text for text in run_ranks(program, 2, compiled=compiled))


def test_a_part_may_be_gathered_into_its_own_place(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        whole = group.empty((6,))
        own = whole.split((1, 3, 2))[group.rank]
        own.fill_(group.rank)
        group.all_gather(whole, own, (1, 3, 2))
        return [float(value) for value in whole]

    assert run_ranks(program, 3, compiled=compiled) == [[0, 1, 1, 1, 2, 2]] * 3
