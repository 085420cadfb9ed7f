"""Ranks on named axes: coordinates, lines and replicas."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.specs import Mesh
from weft.specs.mesh import MESH_AXES

sizes = st.fixed_dictionaries({axis: st.integers(1, 2) for axis in MESH_AXES})


def meshes_of(found: dict[str, int]) -> list[Mesh]:
    """The mesh as each of its ranks sees it."""
    first = replace(Mesh(), **found)  # type: ignore[arg-type]  # they are sizes
    return [replace(first, rank=rank) for rank in range(first.num_ranks)]


@settings(max_examples=20)
@given(sizes)
def test_coordinates_name_every_rank_once(found: dict[str, int]) -> None:
    places = [tuple(mesh.coordinate(axis) for axis in MESH_AXES) for mesh in meshes_of(found)]
    assert places == sorted(set(places))


@settings(max_examples=20)
@given(sizes)
def test_a_line_holds_the_ranks_that_differ_on_its_axis_alone(found: dict[str, int]) -> None:
    meshes = meshes_of(found)
    for axis in MESH_AXES:
        for mesh in meshes:
            own = mesh.along(axis)
            assert mesh.rank in own and len(own) == mesh.size(axis)
            assert own == tuple(other.rank for other in meshes if other.line((axis,)) == mesh.line((axis,)))
            assert [meshes[rank].coordinate(axis) for rank in own] == list(range(mesh.size(axis)))


@settings(max_examples=20)
@given(sizes)
def test_every_replica_holds_the_model_once(found: dict[str, int]) -> None:
    meshes = meshes_of(found)
    for replica in range(meshes[0].num_replicas):
        parts = [(m.coordinate("pipeline"), m.coordinate("tensor")) for m in meshes if m.replica == replica]
        assert len(set(parts)) == len(parts) == meshes[0].pipeline * meshes[0].tensor


def test_tensor_ranks_are_neighbours_and_stages_are_furthest_apart() -> None:
    mesh = Mesh(0, pipeline=2, data=2, tensor=2)
    assert mesh.along("tensor") == (0, 1)
    assert mesh.along("data") == (0, 2)
    assert mesh.along("pipeline") == (0, 4)
