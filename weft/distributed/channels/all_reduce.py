"""Ranks in one group: synchronous data parallelism, and schemes whose ranks meet as a group now and then."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.codecs import AbstractCodec, make_codec
from weft.distributed.consistency import relax
from weft.distributed.place import AbstractPlace
from weft.distributed.placement import DataParallel, MeshGroups, ShardedState
from weft.distributed.placement.reducers import AbstractReducer, ScatterReducer
from weft.specs import Plan
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import AbstractReplicas, SoloReplicas

__all__ = ["replicas_in", "use_all_reduce"]


@contextmanager
def use_all_reduce(plan: Plan, place: AbstractPlace, spec: RunSpec) -> Iterator[AbstractReplicas]:
    """Be one of the ranks, until the block ends."""
    if plan.num_ranks == 1:
        yield SoloReplicas()
        return
    with ExitStack() as opened:
        world = place.open_group(plan)
        opened.callback(world.close)
        groups = MeshGroups(world, plan.mesh(world.rank))
        opened.callback(groups.close)
        yield replicas_in(groups, plan, spec)


def replicas_in(groups: MeshGroups, plan: Plan, spec: RunSpec = RunSpec()) -> AbstractReplicas:  # noqa: B008 -- frozen
    """The replicas of a plan in the groups of its mesh. A collective call."""
    codec = make_codec(plan.compress)
    placement, make_reducer = _place(groups, plan, codec, whole_gradients=spec.whole_gradients)
    synchronous = DataParallel(
        groups.replicas,
        world=groups.world,
        mesh=groups.mesh,
        buffers=spec.buffers,
        codec=codec,
        placement=placement,
        make_reducer=make_reducer,
    )
    return relax(synchronous, groups.replicas, plan.consistency, make_codec(plan.compress))


def _place(
    groups: MeshGroups, plan: Plan, codec: AbstractCodec, *, whole_gradients: bool
) -> tuple[AbstractPlacement, Callable[[], AbstractReducer] | None]:
    """The placement of a plan, and how sums of gradients come to where it needs them; None for all, to all ranks."""
    if plan.shard == 1:
        return WholeModel(), None
    shard, data = groups.along("shard"), groups.along("data")
    placement = ShardedState(shard)
    return placement, None if whole_gradients else lambda: ScatterReducer(shard, data, codec, placement)
