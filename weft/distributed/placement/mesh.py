"""The mesh at work: the group of ranks along each of its axes, and that of all replicas."""

from typing import final

from weft.distributed.group.group import AbstractGroup
from weft.specs import Axis, Mesh

__all__ = ["MeshGroups"]


@final
class MeshGroups:
    """Groups of a mesh, split from the one of all ranks. All ranks ask for the same ones in the same order.

    Args:
        world: all ranks of the mesh, in the order of the mesh.
        mesh: as this rank sees it.
    """

    def __init__(self, world: AbstractGroup, mesh: Mesh) -> None:
        assert (world.rank, world.size) == (mesh.rank, mesh.num_ranks), "the group is that of the whole mesh"
        self.world = world
        self.mesh = mesh
        self._found: dict[Axis | None, AbstractGroup] = {}

    def along(self, axis: Axis) -> AbstractGroup:
        """The ranks that differ from this one on the axis alone."""
        return self._split(axis, self.mesh.size(axis), self.mesh.line(axis), self.mesh.coordinate(axis))

    @property
    def replicas(self) -> AbstractGroup:
        """One rank of every replica: those that hold the same part of the model, and average their gradients."""
        mesh = self.mesh
        part = mesh.coordinate("pipeline") * mesh.tensor + mesh.coordinate("tensor")
        return self._split(None, mesh.num_replicas, part, mesh.replica)

    def close(self) -> None:
        for group in self._found.values():
            group.close()
        self._found.clear()

    def _split(self, key: Axis | None, size: int, colour: int, order: int) -> AbstractGroup:
        if size == self.mesh.num_ranks:
            return self.world
        if key not in self._found:
            self._found[key] = self.world.split(colour, order)
        return self._found[key]
