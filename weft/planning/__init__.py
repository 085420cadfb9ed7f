"""Costs of communication as data: data in, times and decisions out."""

from weft.planning.cluster import ClusterSpec, Link, read_cluster, write_cluster
from weft.planning.collective_cost import (
    ALL_REDUCE_ALGORITHMS,
    AllReduceAlgorithm,
    CollectiveName,
    CommunicationCost,
    all_reduce_cost,
    collective_cost,
    estimate,
)
from weft.planning.network import (
    LinkSchedule,
    NetworkFit,
    NetworkModel,
    SlowPair,
    Transfer,
    fit_alpha_beta,
    network_of,
)
from weft.planning.plan_cost import plan_cost

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "AllReduceAlgorithm",
    "ClusterSpec",
    "CollectiveName",
    "CommunicationCost",
    "Link",
    "LinkSchedule",
    "NetworkFit",
    "NetworkModel",
    "SlowPair",
    "Transfer",
    "all_reduce_cost",
    "collective_cost",
    "estimate",
    "fit_alpha_beta",
    "network_of",
    "plan_cost",
    "read_cluster",
    "write_cluster",
]
