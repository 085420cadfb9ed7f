"""MPI under a real mpirun: the contract, and lost peers named by the launcher or by the signs of life."""

from typing import Any

import pytest

from tests.distributed.group import contract
from tests.processes.launchers import mpirun, run_launched
from weft.distributed.group.mpi import import_mpi
from weft.errors import UsageError

pytest.importorskip("mpi4py", reason="needs the extra: pip install 'weft[mpi]'")


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """What three ranks found in one start: the contract by all, by two of them, and a silent peer."""
    return run_launched(mpirun(3), "tests.processes.programs:keep_contract_and_lose_peer", 3)[0]


def test_mpi_keeps_the_contract(found: list[Any]) -> None:
    contract.check_kind(contract.everything, lambda _program, _size: found[0][0], 3)


def test_a_part_of_two_ranks_keeps_the_contract(found: list[Any]) -> None:
    contract.check_kind(contract.everything, lambda _program, _size: found[0][1], 2)


def test_a_silent_peer_is_named_on_every_surviving_rank(found: list[Any]) -> None:
    contract.check_loss([one and one[2] for one in found], 3)


def lose(size: int, collective: str, *options: str) -> tuple[list[Any], str]:
    path = "tests.processes.programs:lose_peer"
    return run_launched(mpirun(size, *options), path, size, kind="mpi", collective=collective, how="dead")


def test_mpirun_names_a_rank_that_died() -> None:
    assert "process rank 1" in lose(2, "barrier")[1]


def test_a_dead_peer_is_named_where_mpirun_tolerates_it() -> None:
    contract.check_loss(lose(3, "recv", "--with-ft", "ulfm")[0], 3)


def test_a_group_that_another_thread_closes_ends_the_waiting_in_it() -> None:
    path = "tests.processes.programs:close_while_waiting"
    assert run_launched(mpirun(2), path, 2, kind="mpi")[0] == ["UsageError", "PeerLostError"]


def test_a_missing_package_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[mpi\]'"):
        import_mpi()
