"""Two transports as one group: in virtual time over many shapes, and over shared memory with Gloo in processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.group import contract
from tests.processes.ranks import run_processes
from weft.distributed.group import AbstractGroup, AllReduce, Broadcast, RecordingGroup
from weft.distributed.group.hierarchical import HierarchicalGroup
from weft.distributed.virtual import die, run_virtual
from weft.errors import UsageError


def as_hosts(group: AbstractGroup, ranks_per_host: int) -> HierarchicalGroup:
    row, column = divmod(group.rank, ranks_per_host)
    return HierarchicalGroup(group.split(row, column), group)


def run_hosts(program: Callable[[AbstractGroup], Any], size: int, *, ranks_per_host: int) -> list[Any]:
    result = run_virtual(
        lambda group: program(as_hosts(group, ranks_per_host)), size, timeout=contract.CONTRACT_TIMEOUT
    )
    return list(result.results)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_every_shape_keeps_the_contract(size: int, ranks_per_host: int) -> None:
    contract.check_kind(contract.everything, partial(run_hosts, ranks_per_host=ranks_per_host), size)


@pytest.mark.parametrize("how", [die, None], ids=["dead", "silent"])
@pytest.mark.parametrize("collective", contract.COLLECTIVES)
def test_a_lost_peer_is_named_across_hosts(collective: str, how: Callable[[], Any] | None) -> None:
    program = partial(contract.lose, collective=collective, die=how)
    told = run_hosts(program, 4, ranks_per_host=2)
    contract.check_loss(told, 4)


def test_each_column_carries_its_share_between_hosts() -> None:
    def count(group: AbstractGroup) -> dict[str, int]:
        hosts = as_hosts(group, 2)
        row, column, again = hosts._stages
        recording = RecordingGroup(column)
        hosts._stages = (row, recording, again)
        hosts.all_reduce(torch.ones(1000))
        return recording.traffic.num_bytes

    assert list(run_virtual(count, 4).results) == [{"AllReduce": 2000}] * 4


def test_calls_overlap_and_never_overtake_each_other() -> None:
    """Ranks that wait in different orders, and one that waits before it starts the next, still agree."""

    def mix(group: AbstractGroup) -> list[float]:
        hosts = as_hosts(group, 2)
        first, second = torch.full((5,), 1.0 + group.rank), torch.full((3,), 10.0)
        works = [hosts.start(AllReduce(first))]
        if group.rank == 0:
            works[0].wait()
        works.append(hosts.start(Broadcast(second, root=3)))
        works.append(hosts.start(AllReduce(second)))
        for work in reversed(works) if group.rank % 2 else works:
            work.wait()
        return [first[4].item(), second[2].item()]

    assert list(run_virtual(mix, 4).results) == [[10.0, 40.0]] * 4


def test_ranks_that_do_not_count_host_by_host_are_refused() -> None:
    def build(group: AbstractGroup) -> str:
        with pytest.raises(UsageError, match="host by host") as refusal:
            HierarchicalGroup(group.split(group.rank % 2, group.rank), group)
        return str(refusal.value)

    assert "start the same number on each host" in run_virtual(build, 4).results[1]


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_with_gloo_keeps_the_contract(size: int) -> None:
    def run(_: contract.Program, size: int) -> list[contract.Report]:
        return run_processes("tests.processes.programs:keep_contract", size, kind="hierarchical", ranks_per_host=2)

    contract.check_kind(contract.everything, run, size)


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_shared_memory_with_gloo_names_a_lost_peer(how: str) -> None:
    path, is_silent = "tests.processes.programs:lose_peer", how == "silent"
    told = run_processes(
        path, 4, is_last_silent=is_silent, kind="hierarchical", collective="all_reduce", how=how, ranks_per_host=2
    )
    contract.check_loss(told, 4)
