"""Costs of communication as data: data in, times and decisions out."""

from weft.planning.cluster import ClusterSpec, Link, read_cluster, write_cluster
from weft.planning.collective_cost import (
    ALL_REDUCE_ALGORITHMS,
    AllReduceAlgorithm,
    CollectiveName,
    Cost,
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

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "AllReduceAlgorithm",
    "ClusterSpec",
    "CollectiveName",
    "Cost",
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
    "read_cluster",
    "write_cluster",
]
