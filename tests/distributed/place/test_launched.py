"""Which rank this is, from the variables of whoever started it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed
from torch.distributed import distributed_c10d

from weft.distributed.place import Launch, find_launch, has_met, meeting, open_group, open_launched_mailbox
from weft.distributed.place.open_group import open_world
from weft.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": number for name, number in {"RANK": "3", "SIZE": "4", "LOCAL_SIZE": "2"}.items()}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
WEFT = {"WEFT_RANK": "1", "WEFT_SIZE": "2", "WEFT_MEETING": "/folder"}
HOSTS = {"WEFT_RANK": "3", "WEFT_SIZE": "4", "WEFT_LOCAL_SIZE": "2", "WEFT_LOCAL_RANK": "1"}
HOSTS |= {"WEFT_RENDEZVOUS": "10.0.0.1:29500"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("nobody")),
        (WEFT, Launch("weft", 1, 2, "/folder", 2, local_rank=1)),
        (TORCHRUN, Launch("torchrun", 3, 4, "10.0.0.1:29500", 2, local_rank=1)),
        (MPIRUN, Launch("mpirun", 3, 4, "", 2, local_rank=1)),
        ({**TORCHRUN, **WEFT}, Launch("weft", 1, 2, "/folder", 2, local_rank=1)),
        ({**TORCHRUN, **HOSTS}, Launch("hosts", 3, 4, "10.0.0.1:29500", 2, local_rank=1)),
        ({"RANK": "3"}, Launch("nobody")),
    ],
)
def test_every_launcher_is_known_by_its_variables(environment: dict[str, str], launch: Launch) -> None:
    assert find_launch(environment) == launch


@pytest.mark.parametrize("environment", [{**WEFT, "WEFT_SIZE": "two"}, {**TORCHRUN, "RANK": ""}])
def test_variables_that_make_no_sense_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="start it with weft run"):
        find_launch(environment)


def test_one_host_holds_all_ranks() -> None:
    assert find_launch(WEFT).is_one_host
    assert not find_launch(TORCHRUN).is_one_host


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"PMIX_RANK": "0", "PMIX_SIZE": "2"},
        {"PMIX_RANK": "1"},
    ],
)
def test_ranks_of_an_unknown_launcher_do_not_each_train_alone(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"which Weft does not know.*start them with"):
        find_launch(environment)


ALONE = [{"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}]


@pytest.mark.parametrize("environment", ALONE)
def test_one_process_under_another_launcher_is_one_rank(environment: dict[str, str]) -> None:
    assert find_launch(environment) == Launch("nobody")


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has met nobody yet."""
    monkeypatch.setattr(meeting, "_met", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(distributed_c10d, "_default_pg_init_method", None)


@pytest.mark.parametrize("meet", [open_group, open_launched_mailbox, lambda launch: open_world(launch, 1)])
def test_ranks_that_weft_brings_together_have_met(stranger: None, meet: Callable[[Launch], Any]) -> None:
    assert not has_met()
    meet(Launch("nobody")).close()
    assert has_met()


@pytest.mark.parametrize("has_store", [False, True])
def test_ranks_that_torch_brings_together_have_met_also_when_they_have_parted(
    stranger: None, tmp_path: Path, has_store: bool
) -> None:
    url = {"init_method": f"file://{tmp_path}/meeting"}
    how: dict[str, Any] = {"store": vars(distributed)["HashStore"]()} if has_store else url
    distributed.init_process_group("gloo", rank=0, world_size=1, **how)
    distributed.destroy_process_group()
    assert has_met()
