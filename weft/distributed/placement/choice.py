"""From the axes that a plan splits a model on to the placement of a rank: one for each axis, around each other.

pipeline=2 tensor=2 shard=2        ShardedState(inner=TensorParallel(inner=Pipeline(inner=WholeModel())))

A maker is a function of (groups, plan, inner), and of rules where the axis has some. It asks the mesh for groups as the
plan alone says, so that all ranks, of whatever stage, make them in the same order.
"""

from collections.abc import Callable, Mapping

from weft.distributed.codecs import AbstractCodec
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.inside import InsideReplica
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.reducers import AbstractReducer, ScatterReducer
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.sharded import ShardedState
from weft.distributed.placement.sharded_model import ShardedModel
from weft.specs import Axis, Plan
from weft.specs.loading import load
from weft.specs.mesh import REPLICATED
from weft.training.placement import AbstractPlacement, WholeModel

__all__ = ["inside_of", "open_groups", "place"]

MAKERS: Mapping[Axis, str] = {
    "pipeline": "weft.distributed.placement.pipeline:make_pipeline",
    "expert": "weft.distributed.placement.expert:make_expert",
    "linear": "weft.distributed.placement.linear:make_linear",
    "tensor": "weft.distributed.placement.tensor:make_tensor",
}
"""Innermost first: what is cut first."""

WORDS: Mapping[Axis, str] = {
    "linear": "weft.distributed.placement.linear:WORDS",
    "tensor": "weft.distributed.placement.tensor:WORDS",
}
"""Of rules by hand, on axes that have some."""

NOTHING: Mapping[str, object] = {}


def place(
    groups: MeshGroups,
    plan: Plan,
    codec: AbstractCodec,
    *,
    whole_gradients: bool,
    rules: Rules = NO_RULES,
    of_stages: Mapping[str, object] = NOTHING,
) -> tuple[AbstractPlacement, Callable[[], AbstractReducer] | None]:
    """The placement of a plan, and how sums of gradients come to where it needs them; None for all, to all ranks.

    Args:
        of_stages: for whoever places stages: `stream`, `times` and `log`, as make_pipeline says.
    """
    placement: AbstractPlacement = WholeModel()
    split = [axis for axis in MAKERS if getattr(plan, axis) != 1]
    rules.check_words({axis: load(WORDS[axis]) for axis in split if axis in WORDS})
    for axis in split:
        options: dict[str, object] = {"rules": rules} if axis in WORDS else {}
        if axis == "pipeline":
            options |= of_stages
        placement = load(MAKERS[axis])(groups, plan, placement, **options)
    if plan.shard == 1:
        return placement, None
    shard, holders, level = groups.along("shard"), groups.holders, plan.sharding_level

    def others_of(name: str) -> AbstractGroup | None:
        axes = tuple(axis for axis in sharded.reduced_over(name) if axis != "shard")
        return groups.over(axes) if any(groups.mesh.size(axis) > 1 for axis in axes) else None

    offloads = plan.offloads_state
    if level > 1:
        sharded: ShardedModel | ShardedState = ShardedModel(shard, level, placement, holders, offloads=offloads)
    else:
        sharded = ShardedState(shard, placement, holders, whole_gradients=whole_gradients, offloads=offloads)
        if whole_gradients:
            return sharded, None
    return sharded, lambda: ScatterReducer(shard, others_of, codec, sharded.cuts, keeps_whole=level == 1)


def open_groups(groups: MeshGroups) -> None:
    """Those in which gradients may be added up. A collective call: later each rank asks for those that it needs."""
    for without in ((), ("expert",), ("linear",)):
        axes = tuple(axis for axis in REPLICATED if axis not in without)
        groups.over(axes)
        groups.over((*axes, "tensor"))
        if groups.mesh.shard > 1:  # among those that hold the same piece
            inside = tuple(axis for axis in axes if axis != "shard")
            groups.over(inside)
            groups.over((*inside, "tensor"))


def inside_of(groups: MeshGroups, plan: Plan, placement: AbstractPlacement) -> InsideReplica | None:
    """The ranks that hold a model together; None where each holds all of it. A collective call."""
    if not plan.splits_model:
        return None
    groups.over(("tensor",))  # along which gradients may be added up before anything else
    return InsideReplica(groups.one_replica, placement, groups.over)
