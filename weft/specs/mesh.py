"""A mesh: ranks on named axes, and where one of them stands.

    pipeline=2 data=1 shard=2 tensor=2        the axis that talks most lies innermost, so that its ranks are neighbours
                                              and share a host
                 shard 0        shard 1
    stage 0    [ r0 r1 ]      [ r2 r3 ]       tensor groups      {0, 1} {2, 3} {4, 5} {6, 7}
    stage 1    [ r4 r5 ]      [ r6 r7 ]       replicas           {0, 1, 4, 5} and {2, 3, 6, 7}

A replica is a set of ranks that together hold the model once and take one share of a batch. Ranks on the axes `data`,
`shard`, `expert` and `linear` are of different replicas; ranks on `tensor` and `pipeline` have parts of the same one.
Along `expert` and `linear` some layers are split all the same (experts; linear layers), for the samples of all its
ranks: a layer's part is then held by fewer ranks than there are replicas.

Stages of a pipeline may be split in different ways, `pipeline=2 tensor=1:2`:

    stage 0    [ r0 ]       the same samples go through r0 and then r1, r2, which have one half of every layer each
    stage 1    [ r1 r2 ]
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

__all__ = ["MESH_AXES", "REPLICATED", "Axis", "Mesh"]

Axis = Literal["pipeline", "data", "shard", "expert", "linear", "tensor"]
MESH_AXES: tuple[Axis, ...] = get_args(Axis)
"""Outermost first."""

REPLICATED: tuple[Axis, ...] = ("data", "shard", "expert", "linear")
"""Axes whose ranks take different samples."""

INSIDE_STAGES: tuple[Axis, ...] = MESH_AXES[1:]


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, and the rank that looks at them.

    Args:
        stages: the size of the axis `tensor` in each stage, where stages differ; empty where it is `tensor` in all.

    >>> mesh = Mesh(rank=6, pipeline=2, shard=2, tensor=2)
    >>> mesh.coordinate("pipeline"), mesh.coordinate("shard"), mesh.replica, mesh.num_replicas
    (1, 1, 1, 2)
    >>> mesh.along("pipeline")
    (2, 6)
    >>> ragged = Mesh(rank=2, pipeline=2, stages=(1, 2))
    >>> ragged.num_ranks, ragged.coordinate("pipeline"), ragged.coordinate("tensor"), ragged.along("pipeline")
    (3, 1, 1, (0, 2))
    """

    rank: int = 0
    pipeline: int = 1
    data: int = 1
    shard: int = 1
    expert: int = 1
    linear: int = 1
    tensor: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.stages or len(self.stages) == self.pipeline, "every stage has its size"
        assert 0 <= self.rank < self.num_ranks, "a rank is one of its mesh"

    @property
    def num_ranks(self) -> int:
        return self.num_replicas * sum(self._tensor_sizes)

    @property
    def replica(self) -> int:
        """The number of this rank's replica: which share of a batch it takes."""
        return self.number(REPLICATED)

    @property
    def num_replicas(self) -> int:
        return prod(map(self.size, REPLICATED))

    @property
    def part(self) -> int:
        """The number of this rank among those of its replica, stage by stage: which part of the model it holds."""
        stage = self.coordinate("pipeline")
        return sum(self._tensor_sizes[:stage]) + self.coordinate("tensor")

    @property
    def num_parts(self) -> int:
        return sum(self._tensor_sizes)

    def holders_of(self, part: int) -> tuple[int, ...]:
        """The ranks that hold this part of the model, in the order of replicas.

        >>> Mesh(pipeline=2, data=3).holders_of(1)
        (3, 4, 5)
        """
        seen = (self.seen_by(rank) for rank in range(self.num_ranks))
        return tuple(mesh.rank for mesh in sorted((m for m in seen if m.part == part), key=lambda m: m.replica))

    def seen_by(self, rank: int) -> "Mesh":
        """The same mesh, as another of its ranks sees it."""
        return replace(self, rank=rank)

    def size(self, axis: Axis) -> int:
        """Along the line of this rank: stages may differ in `tensor`."""
        if axis == "tensor":
            return self._tensor_sizes[self.coordinate("pipeline")]
        size: int = getattr(self, axis)
        return size

    def coordinate(self, axis: Axis) -> int:
        if axis == "pipeline":
            ends = [self._first_of(stage + 1) for stage in range(self.pipeline)]
            return next(stage for stage, end in enumerate(ends) if self.rank < end)
        inside = self.rank - self._first_of(self.coordinate("pipeline"))
        return inside // self._stride(axis) % self.size(axis)

    def along(self, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one on the axis alone, itself among them, in their order. In a stage that is
        split in fewer ways than this rank's, the one that stands for it: ranks of a stage take turns."""
        if axis == "pipeline":
            return tuple(self.rank_in(stage) for stage in range(self.pipeline))
        stride = self._stride(axis)
        first = self.rank - self.coordinate(axis) * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def rank_in(self, stage: int) -> int:
        """The rank of another stage that has the same samples, and, as far as there is one, the same part of layers."""
        size = self._tensor_sizes[stage]
        return self._first_of(stage) + self.replica * size + self.coordinate("tensor") % size

    def ranks_in(self, stage: int) -> tuple[int, ...]:
        """All ranks of a stage that have the samples of this one: its parts of layers, in their order."""
        size = self._tensor_sizes[stage]
        first = self._first_of(stage) + self.replica * size
        return tuple(range(first, first + size))

    def line(self, axes: tuple[Axis, ...]) -> int:
        """The same number for all ranks that differ on these axes alone, and another for the others: the colour of a
        split."""
        others = tuple(axis for axis in INSIDE_STAGES if axis not in axes)
        if "pipeline" in axes:
            return self.number(others)
        stage = self.coordinate("pipeline")
        return self._first_of(stage) + self.number(others)

    def number(self, axes: tuple[Axis, ...]) -> int:
        """The coordinates on these axes as one number, the first axis counting most."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.coordinate(axis)
        return number

    @property
    def _tensor_sizes(self) -> tuple[int, ...]:
        return self.stages or (self.tensor,) * self.pipeline

    def _first_of(self, stage: int) -> int:
        """The first rank of a stage; ranks of one lie together."""
        return self.num_replicas * sum(self._tensor_sizes[:stage])

    def _stride(self, axis: Axis) -> int:
        return prod(map(self.size, MESH_AXES[MESH_AXES.index(axis) + 1 :]))
