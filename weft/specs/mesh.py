"""A mesh: ranks on named axes, and where one of them stands.

    pipeline=2 data=1 shard=2 tensor=2        the axis that talks most lies innermost, so that its ranks are neighbours
                                              and share a host
                 shard 0        shard 1
    stage 0    [ r0 r1 ]      [ r2 r3 ]       tensor groups      {0, 1} {2, 3} {4, 5} {6, 7}
    stage 1    [ r4 r5 ]      [ r6 r7 ]       replicas           {0, 1, 4, 5} and {2, 3, 6, 7}

A replica is a set of ranks that together hold the model once and take one share of a batch. Ranks on the axes `data`
and `shard` are of different replicas; ranks on `tensor` and `pipeline` have parts of the same one.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

__all__ = ["MESH_AXES", "Axis", "Mesh"]

Axis = Literal["pipeline", "data", "shard", "tensor"]
MESH_AXES: tuple[Axis, ...] = get_args(Axis)
"""Outermost first."""

REPLICATED: tuple[Axis, ...] = ("data", "shard")


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, and the rank that looks at them.

    >>> mesh = Mesh(rank=6, pipeline=2, shard=2, tensor=2)
    >>> mesh.coordinate("pipeline"), mesh.coordinate("shard"), mesh.replica, mesh.num_replicas
    (1, 1, 1, 2)
    >>> mesh.along("pipeline")
    (2, 6)
    """

    rank: int = 0
    pipeline: int = 1
    data: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.num_ranks, "a rank is one of its mesh"

    @property
    def num_ranks(self) -> int:
        return prod(map(self.size, MESH_AXES))

    @property
    def replica(self) -> int:
        """The number of this rank's replica: which share of a batch it takes."""
        return self._number(REPLICATED)

    @property
    def num_replicas(self) -> int:
        return prod(map(self.size, REPLICATED))

    def size(self, axis: Axis) -> int:
        size: int = getattr(self, axis)
        return size

    def coordinate(self, axis: Axis) -> int:
        return self.rank // self._stride(axis) % self.size(axis)

    def along(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one on the axis alone, itself among them, in their order."""
        stride = self._stride(axis)
        first = self.rank - self.coordinate(axis) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def line(self, axis: Axis) -> int:
        """The same number for all ranks along the axis, and another for the others: the colour of a split."""
        return self._number(tuple(other for other in MESH_AXES if other != axis))

    def _stride(self, axis: Axis) -> int:
        return prod(map(self.size, MESH_AXES[MESH_AXES.index(axis) + 1 :]))

    def _number(self, axes: tuple[Axis, ...]) -> int:
        """The coordinates on these axes as one number, the first axis counting most."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.coordinate(axis)
        return number
