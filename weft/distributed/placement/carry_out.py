"""From a plan and a group to the replicas that carry it out."""

from typing import Literal, cast

from weft.distributed.collectives import AlgorithmChoice, AlgorithmName, MessageGroup, probe
from weft.distributed.consistency import relax
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.data_parallel import DataParallel
from weft.errors import PlanError
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas, SoloReplicas

__all__ = ["carry_out", "with_topology"]


def carry_out(plan: Plan, group: AbstractGroup, *, buffers: Literal["mean", "rank"] = "mean") -> AbstractReplicas:
    """The replicas of the plan, one per rank of the group. A collective call.

    Raises:
        PlanError: the plan is for another number of ranks.
    """
    if plan.num_ranks != group.size:
        numbers = f"plan: {plan.num_ranks}, ranks: {group.size}"
        raise PlanError(f"plan needs another number of ranks than there are ({numbers}); --workers {group.size}")
    if plan.is_served:
        raise PlanError(f"ranks of this plan meet at servers, not in a group ({plan}); use weft run or weft simulate")
    if plan.is_mailed:
        raise PlanError(f"ranks of this plan meet by mail, not in a group ({plan}); use weft run or weft simulate")
    if group.size == 1:
        return SoloReplicas()
    group = with_topology(group, plan)
    return relax(DataParallel(group, plan, buffers=buffers), group, plan.consistency)


def with_topology(group: AbstractGroup, plan: Plan) -> AbstractGroup:
    """The group, its collectives replaced by the algorithm that the plan names.

    `auto` fits alpha and beta here and now, and chooses by them for every message.
    """
    name = plan.topology.name
    if name in ("native", "server"):
        return group
    if name == "auto":
        fit = probe(group)
        return MessageGroup(group, AlgorithmChoice("auto", alpha=fit.alpha, beta=fit.beta))
    inner = int(plan.topology["inner"]) if name == "hierarchical" else None
    return MessageGroup(group, AlgorithmChoice(cast(AlgorithmName, name), inner))
