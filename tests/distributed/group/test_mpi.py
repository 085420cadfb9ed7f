"""MPI under a real mpirun: the contract, and lost peers named by the launcher or by the signs of life."""

from typing import Any

import pytest

from tests.distributed.group import contract
from tests.processes.launchers import mpirun, run_launched
from weft.distributed.group.mpi import import_mpi
from weft.errors import UsageError

pytest.importorskip("mpi4py", reason="needs the extra: pip install 'weft[mpi]'")


@pytest.mark.parametrize("size", [2, 3])
def test_mpi_keeps_the_contract(size: int) -> None:
    def run(_: Any, size: int) -> list[Any]:
        return run_launched(mpirun(size), "tests.processes.programs:keep_contract", size, kind="mpi")[0]

    contract.check_kind(contract.everything, run, size)


def lose(collective: str, how: str, *options: str) -> tuple[list[Any], str]:
    path = "tests.processes.programs:lose_peer"
    return run_launched(mpirun(3, *options), path, 3, kind="mpi", collective=collective, how=how)


def test_a_silent_peer_is_named_on_every_surviving_rank() -> None:
    contract.check_loss(lose("all_reduce", "silent")[0], 3)


def test_mpirun_names_a_rank_that_died() -> None:
    assert "process rank 2" in lose("barrier", "dead")[1]


def test_a_dead_peer_is_named_where_mpirun_tolerates_it() -> None:
    contract.check_loss(lose("recv", "dead", "--with-ft", "ulfm")[0], 3)


def test_a_missing_package_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mpi4py.MPI", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[mpi\]'"):
        import_mpi()
