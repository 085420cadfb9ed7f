"""Which rank this is, from the variables of whoever started it."""

import pytest

from weft.distributed.place import Launch, find_launch
from weft.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": number for name, number in {"RANK": "3", "SIZE": "4", "LOCAL_SIZE": "2"}.items()}
MPIRUN |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
WEFT = {"WEFT_RANK": "1", "WEFT_SIZE": "2", "WEFT_MEETING": "/folder"}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch("nobody")),
        (WEFT, Launch("weft", 1, 2, "/folder", 2, local_rank=1)),
        (TORCHRUN, Launch("torchrun", 3, 4, "10.0.0.1:29500", 2, local_rank=1)),
        (MPIRUN, Launch("mpirun", 3, 4, "", 2, local_rank=1)),
        ({**TORCHRUN, **WEFT}, Launch("weft", 1, 2, "/folder", 2, local_rank=1)),
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
