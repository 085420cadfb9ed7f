"""Ranks in one group: synchronous data parallelism, and schemes whose ranks meet as a group now and then."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.channels.share_log import measured_shares
from weft.distributed.channels.stage_log import stage_log
from weft.distributed.codecs import make_codec
from weft.distributed.consistency import relax
from weft.distributed.group.clock import VirtualTimes
from weft.distributed.place import AbstractPlace
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.placement.choice import inside_of, open_groups, place
from weft.distributed.placement.factored_model import FactoredModel
from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.placement.pipeline import make_stream
from weft.distributed.placement.pipeline.pipedream_replicas import PipeDreamReplicas
from weft.distributed.placement.rules import Rules
from weft.specs import Plan
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
        yield replicas_in(groups, plan, spec, place.times)


def replicas_in(
    groups: MeshGroups,
    plan: Plan,
    spec: RunSpec = RunSpec(),  # noqa: B008 -- frozen
    times: VirtualTimes | None = None,
) -> AbstractReplicas:
    """The replicas of a plan in the groups of its mesh. A collective call.

    Args:
        times: of computation, where time is virtual.
    """
    codec = make_codec(plan.compress, rank=groups.mesh.replica)
    open_groups(groups)
    stream = make_stream(plan, groups.mesh)
    of_stages = {"stream": stream, "times": times, "log": stage_log(plan, groups.mesh, spec)}
    placement, make_reducer = place(
        groups, plan, codec, whole_gradients=spec.whole_gradients, rules=Rules(spec.rules), of_stages=of_stages
    )
    factors = FactoredLayers() if plan.sends_factors else None
    if factors is not None and not spec.whole_gradients:  # a script finds the layers of its models itself
        placement = FactoredModel(factors)
    synchronous = DataParallel(
        groups.replicas,
        world=groups.world if stream is None else groups.replicas,
        mesh=groups.mesh,
        buffers=spec.buffers,
        codec=codec,
        placement=placement,
        group_over=groups.over,
        make_reducer=make_reducer,
    )
    synchronous.factors = factors
    synchronous.shares = measured_shares(plan, groups.mesh, groups.world.clock, spec)
    if stream is not None:
        return PipeDreamReplicas(synchronous, groups.world, stream)
    return relax(
        synchronous,
        groups.replicas,
        plan.consistency,
        make_codec(plan.compress, rank=groups.mesh.replica),
        world=groups.world,
        inside=inside_of(groups, plan, placement),
    )
