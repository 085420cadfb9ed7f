"""From places to groups: which kind is chosen, what is refused, and real meetings under every starter."""

import pytest

from tests.processes.launchers import mpirun, run_launched, torchrun
from tests.processes.ranks import run_processes
from weft.distributed.group import SoloGroup
from weft.distributed.place import Launch
from weft.distributed.place.open_group import Kind, choose_kind, open_group
from weft.errors import UsageError

KINDS = ["auto", "torch", "hierarchical", "shared_memory"]
MET = ["SharedMemoryGroup 0 3", "TorchGroup 1 3", "HierarchicalGroup 2 3", "SharedMemoryGroup 3 3"]


@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        (Launch("nobody"), "solo"),
        (Launch("weft", 1, 2, "/folder", 2), "shared_memory"),
        (Launch("torchrun", 0, 1, "h:1", 1), "solo"),
        (Launch("torchrun", 0, 4, "h:1", 4), "shared_memory"),
        (Launch("torchrun", 0, 4, "h:1", 2), "hierarchical"),
        (Launch("torchrun", 0, 4, "h:1", 1), "torch"),
        (Launch("mpirun", 0, 4, "", 4), "shared_memory"),
        (Launch("mpirun", 0, 4, "", 2), "mpi"),
    ],
)
def test_the_kind_follows_from_the_place(launch: Launch, kind: Kind) -> None:
    assert choose_kind(launch) == kind


def test_one_rank_alone_needs_no_transport() -> None:
    group = open_group(Launch("nobody"), generation=3)
    assert isinstance(group, SoloGroup)
    assert (group.size, group.generation) == (1, 3)


@pytest.mark.parametrize(
    ("launch", "kind", "text"),
    [
        (Launch("weft", 0, 2, "/folder", 2), "solo", "solo is for one rank"),
        (Launch("torchrun", 0, 4, "h:1", 2), "shared_memory", "choose hierarchical, torch or mpi"),
        (Launch("weft", 0, 2, "/folder", 2), "mpi", "use mpirun"),
        (Launch("nobody"), "torhc", "did you mean 'torch'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_cure(launch: Launch, kind: Kind, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        open_group(launch, kind)


def test_own_ranks_meet_in_their_folder() -> None:
    assert run_processes("tests.processes.programs:meet_over", 2, kinds=KINDS) == [MET, MET]


def test_ranks_of_torchrun_meet_at_its_address_and_beside_the_users_group() -> None:
    met, _ = run_launched(torchrun(2), "tests.processes.programs:meet_beside_default_group", 2, kinds=KINDS)
    assert met == [[*MET, "ours 2, theirs 4"]] * 2


def test_ranks_of_mpirun_meet_over_what_they_ask_for() -> None:
    pytest.importorskip("mpi4py")
    met, _ = run_launched(mpirun(2), "tests.processes.programs:meet_over", 2, kinds=[*KINDS, "mpi"])
    assert met == [[*MET, "MpiGroup 4 3"]] * 2
