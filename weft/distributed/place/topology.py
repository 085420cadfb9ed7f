"""The topology of a plan over a group: its collectives replaced by the algorithm that the plan names."""

from typing import cast

from weft.distributed.collectives import (
    AlgorithmChoice,
    AlgorithmName,
    MessageGroup,
    probe_all_reduce,
    probe_network,
)
from weft.distributed.group.group import AbstractGroup
from weft.planning.plan_cost import algorithm_of as find_algorithm
from weft.specs import Plan

__all__ = ["algorithm_of", "with_topology"]


def algorithm_of(plan: Plan) -> AlgorithmChoice | None:
    """The plan's all-reduce; None where it names none."""
    name = plan.topology.name
    if name in ("native", "auto", "server"):
        return None
    algorithm = find_algorithm(plan)
    return AlgorithmChoice(cast(AlgorithmName, name), algorithm.inner or None, algorithm.by)


def with_topology(group: AbstractGroup, plan: Plan, ranks_per_host: int | None = None) -> AbstractGroup:
    """The group with the plan's collectives. `auto` measures the network here and now, and the group's own all-reduce,
    and chooses by them for every message.

    Args:
        ranks_per_host: processes on this host; those of one host count one after the other.
    """
    algorithm = algorithm_of(plan)
    if plan.topology.name == "auto" and group.size > 1:
        network = probe_network(group, ranks_per_host)
        algorithm = AlgorithmChoice("auto", network=network, native=probe_all_reduce(group))
    return group if algorithm is None or group.size == 1 else MessageGroup(group, algorithm)
