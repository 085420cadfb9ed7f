"""Gloo over real processes: the contract, and lost peers named by the signs of life."""

import pytest

from tests.distributed.group import contract
from tests.processes.ranks import run_processes


def run_program(size: int, program: str) -> list[contract.Report]:
    return run_processes("tests.processes.programs:keep_contract", size, kind="torch", program=program)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_torch_keeps_the_contract(size: int) -> None:
    contract.check_kind(contract.everything, lambda _, size: run_program(size, "everything"), size)


@pytest.mark.parametrize("collective", contract.COLLECTIVES)
def test_a_dead_peer_is_named_on_every_surviving_rank(collective: str) -> None:
    told = run_processes("tests.processes.programs:lose_peer", 3, kind="torch", collective=collective, how="dead")
    contract.check_loss(told, 3)


@pytest.mark.parametrize("collective", ["all_reduce", "neighbours", "recv"])
def test_a_silent_peer_is_named_on_every_surviving_rank(collective: str) -> None:
    path = "tests.processes.programs:lose_peer"
    told = run_processes(path, 3, is_last_silent=True, kind="torch", collective=collective, how="silent")
    contract.check_loss(told, 3)


def test_a_group_that_another_thread_closes_ends_the_waiting_in_it() -> None:
    assert run_processes("tests.processes.programs:close_while_waiting", 2, kind="torch") == [
        "RuntimeError",
        "PeerLostError",
    ]
