"""The topology of a plan over a group: its collectives replaced by the algorithm that the plan names."""

from typing import cast

from weft.distributed.collectives import AlgorithmChoice, AlgorithmName, MessageGroup, probe
from weft.distributed.group.group import AbstractGroup
from weft.specs import Plan

__all__ = ["algorithm_of", "with_topology"]


def algorithm_of(plan: Plan, ranks_per_host: int | None = None) -> AlgorithmChoice | None:
    """The plan's all-reduce; None where it names none.

    Args:
        ranks_per_host: the size of the inner groups of an algorithm that has some, unless the plan says it.
    """
    name = plan.topology.name
    if name in ("native", "auto", "server"):
        return None
    inner = int(plan.topology["inner"]) if name == "hierarchical" else ranks_per_host
    return AlgorithmChoice(cast(AlgorithmName, name), inner)


def with_topology(group: AbstractGroup, plan: Plan) -> AbstractGroup:
    """The group with the plan's collectives. `auto` fits alpha and beta here and now, and chooses by them for every
    message."""
    algorithm = algorithm_of(plan)
    if plan.topology.name == "auto" and group.size > 1:
        fit = probe(group)
        algorithm = AlgorithmChoice("auto", alpha=fit.alpha, beta=fit.beta)
    return group if algorithm is None or group.size == 1 else MessageGroup(group, algorithm)
