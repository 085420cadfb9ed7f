"""Two transports as one group: in virtual time over many shapes, and over shared memory with Gloo in processes."""

from functools import partial

import pytest
import torch

from tests.distributed.group import contract
from tests.processes.ranks import run_processes
from weft.distributed.group import AbstractGroup, AllReduce, RecordingGroup, SoloGroup
from weft.distributed.group.hierarchical import HierarchicalGroup
from weft.distributed.group.virtual import die, run_virtual
from weft.errors import UsageError


def as_hosts(group: AbstractGroup, ranks_per_host: int) -> HierarchicalGroup:
    row, column = divmod(group.rank, ranks_per_host)
    return HierarchicalGroup(group.split(row, column), group)


def run_hosts(program: contract.Program, size: int, *, ranks_per_host: int) -> list[contract.Report]:
    result = run_virtual(
        lambda group: program(as_hosts(group, ranks_per_host)), size, timeout=contract.CONTRACT_TIMEOUT
    )
    return list(result.results)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(1, 1), (2, 1), (2, 2), (4, 2), (6, 2), (6, 3), (8, 4)])
def test_every_shape_keeps_the_contract(size: int, ranks_per_host: int) -> None:
    contract.check_kind(contract.everything, partial(run_hosts, ranks_per_host=ranks_per_host), size)


@pytest.mark.parametrize("how", [die, None], ids=["dead", "silent"])
@pytest.mark.parametrize("collective", contract.COLLECTIVES)
def test_a_lost_peer_is_named_across_hosts(collective: str, how: contract.Callable[[], object] | None) -> None:
    program = partial(contract.lose, collective=collective, die=how)
    told = run_hosts(program, 4, ranks_per_host=2)  # type: ignore[arg-type]
    contract.check_loss(told, 4)


def test_each_byte_crosses_between_hosts_once() -> None:
    def count(group: AbstractGroup) -> int:
        whole = RecordingGroup(group)
        hosts = as_hosts(whole, 2)
        column = RecordingGroup(hosts._stages[1])
        hosts._stages = (hosts._stages[0], column, hosts._stages[2])
        hosts.all_reduce(torch.ones(1000))
        return sum(traffic.num_bytes for traffic in column.traffic)

    assert run_virtual(count, 4).results


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
    path = "tests.processes.programs:lose_peer"
    told = run_processes(path, 4, kind="hierarchical", collective="all_reduce", how=how, ranks_per_host=2)
    contract.check_loss(told, 4)
