"""When replicas agree: schemes in which they do not meet in every step."""

from weft.distributed.consistency.choice import relax
from weft.distributed.consistency.elastic import ElasticAveraging
from weft.distributed.consistency.gossip import Gossip
from weft.distributed.consistency.graphs import GRAPHS, Mixing, make_mixing
from weft.distributed.consistency.local import LocalAveraging, OuterOptimizer
from weft.distributed.consistency.relaxed import RelaxedReplicas
from weft.distributed.consistency.scheme import AbstractScheme

__all__ = [
    "GRAPHS",
    "AbstractScheme",
    "ElasticAveraging",
    "Gossip",
    "LocalAveraging",
    "Mixing",
    "OuterOptimizer",
    "RelaxedReplicas",
    "make_mixing",
    "relax",
]
