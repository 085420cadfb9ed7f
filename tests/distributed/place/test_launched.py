"""Which rank this is, from the variables of whoever started it."""

import pytest

from weft.distributed.place.launched import Place, find_place
from weft.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
WEFT = {"WEFT_RANK": "1", "WEFT_SIZE": "2", "WEFT_MEETING": "/folder"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place("nobody")),
        (WEFT, Place("weft", 1, 2, "/folder", 2)),
        (TORCHRUN, Place("torchrun", 3, 4, "10.0.0.1:29500", 2)),
        (MPIRUN, Place("mpirun", 1, 2, "", 2)),
        ({**TORCHRUN, **WEFT}, Place("weft", 1, 2, "/folder", 2)),
        ({"RANK": "3"}, Place("nobody")),
    ],
)
def test_every_starter_is_known_by_its_variables(environment: dict[str, str], place: Place) -> None:
    assert find_place(environment) == place


@pytest.mark.parametrize("environment", [{**WEFT, "WEFT_SIZE": "two"}, {**TORCHRUN, "RANK": ""}])
def test_variables_that_make_no_sense_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="start it with weft run"):
        find_place(environment)


def test_one_host_holds_all_ranks() -> None:
    assert find_place(WEFT).is_one_host
    assert not find_place(TORCHRUN).is_one_host
