"""The mesh at work: the group of ranks along its axes, and that of all replicas."""

from typing import final

from weft.distributed.group.group import AbstractGroup
from weft.specs import Axis, Mesh
from weft.specs.mesh import MESH_AXES, REPLICATED

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
        self._found: dict[tuple[Axis, ...], AbstractGroup] = {}
        self._apart: list[AbstractGroup] = []

    def along(self, axis: Axis) -> AbstractGroup:
        """The ranks that differ from this one on the axis alone. Of stages, which may be split in different ways, there
        is no such group: `one_replica` has them."""
        return self.over((axis,))

    def over(self, axes: tuple[Axis, ...]) -> AbstractGroup:
        """The ranks that differ from this one on these axes alone, in the order of the mesh."""
        axes = tuple(axis for axis in MESH_AXES if axis in axes and self._is_used(axis))
        if len(axes) == sum(map(self._is_used, MESH_AXES)):
            return self.world
        if axes not in self._found:
            self._found[axes] = self.world.split(self.mesh.line(axes), self.mesh.rank)
        return self._found[axes]

    def apart(self, axis: Axis) -> AbstractGroup:
        """As `along`, a group of its own: for layers whose calls come between those of gradients that are added up."""
        group = self.world.split(self.mesh.line((axis,)), self.mesh.rank)
        self._apart.append(group)
        return group

    @property
    def replicas(self) -> AbstractGroup:
        """One rank of every replica: those that hold the same part of the model, and average their gradients."""
        return self.over(REPLICATED)

    @property
    def one_replica(self) -> AbstractGroup:
        """The ranks that hold the model once, this one among them, stage by stage."""
        return self.over(("pipeline", "tensor"))

    @property
    def holders(self) -> AbstractGroup:
        """All ranks but those of other copies along `data`: together they hold every part of the model."""
        return self.over(("pipeline", "shard", "expert", "linear", "tensor"))

    def close(self) -> None:
        for group in (*self._found.values(), *self._apart):
            group.close()
        self._found.clear()
        self._apart.clear()

    def _is_used(self, axis: Axis) -> bool:
        """Whether any rank has others along the axis: the same answer on all of them."""
        return max(self.mesh.stages, default=self.mesh.tensor) > 1 if axis == "tensor" else self.mesh.size(axis) > 1
