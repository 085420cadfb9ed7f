"""Ranks in one group: synchronous data parallelism, and schemes whose ranks meet as a group now and then."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.codecs import make_codec
from weft.distributed.consistency import relax
from weft.distributed.group.group import AbstractGroup
from weft.distributed.place import AbstractPlace
from weft.distributed.placement import DataParallel, MeshGroups
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas, SoloReplicas

__all__ = ["replicas_in", "use_all_reduce"]


@contextmanager
def use_all_reduce(plan: Plan, place: AbstractPlace, spec: RunSpec) -> Iterator[AbstractReplicas]:
    """Be one of the ranks, until the block ends."""
    if plan.num_ranks == 1:
        yield SoloReplicas()
        return
    group = place.open_group(plan)
    try:
        yield replicas_in(group, plan, buffers=spec.buffers)
    finally:
        group.close()


def replicas_in(group: AbstractGroup, plan: Plan, *, buffers: Literal["mean", "rank"] = "mean") -> AbstractReplicas:
    """The replicas of a plan in the group of all its ranks. A collective call."""
    groups = MeshGroups(group, plan.mesh(group.rank))
    codec = make_codec(plan.compress)
    synchronous = DataParallel(groups.replicas, world=groups.world, mesh=groups.mesh, buffers=buffers, codec=codec)
    return relax(synchronous, groups.replicas, plan.consistency, make_codec(plan.compress))
