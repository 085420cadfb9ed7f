"""Groups along the axes of a mesh, on the ranks of a virtual cluster."""

import torch

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.specs import Mesh


def sums_of(group: AbstractGroup) -> dict[str, float]:
    """What ranks add up along each axis, each giving its own number."""
    groups = MeshGroups(group, Mesh(group.rank, pipeline=2, data=2, tensor=2))
    found = {}
    for name, part in [
        *((axis, groups.along(axis)) for axis in ("tensor", "data", "pipeline")),
        ("r", groups.replicas),
    ]:
        total = torch.tensor([float(group.rank)])
        part.all_reduce(total)
        found[name] = total.item()
    groups.close()
    return found


def test_each_axis_has_a_group_of_its_own() -> None:
    results = run_virtual(sums_of, 8).results
    assert [found["tensor"] for found in results] == [1, 1, 5, 5, 9, 9, 13, 13]
    assert [found["data"] for found in results] == [2, 4, 2, 4, 10, 12, 10, 12]
    assert [found["pipeline"] for found in results] == [4, 6, 8, 10, 4, 6, 8, 10]


def test_replicas_are_the_ranks_with_the_same_part_of_the_model() -> None:
    results = run_virtual(sums_of, 8).results
    assert [found["r"] for found in results] == [found["data"] for found in results]


def test_an_axis_of_all_ranks_is_the_world_itself() -> None:
    def own(group: AbstractGroup) -> bool:
        groups = MeshGroups(group, Mesh(group.rank, data=2))
        return groups.along("data") is group and groups.replicas is group

    assert run_virtual(own, 2).results == (True, True)
