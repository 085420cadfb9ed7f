"""When replicas agree: schemes in which they do not meet in every step."""

from weft.distributed.consistency.choice import relax
from weft.distributed.consistency.gossip import Gossip
from weft.distributed.consistency.graphs import GRAPHS, make_mixing
from weft.distributed.consistency.local import LocalAveraging
from weft.distributed.consistency.relaxed import RelaxedReplicas

__all__ = [
    "GRAPHS",
    "Gossip",
    "LocalAveraging",
    "RelaxedReplicas",
    "make_mixing",
    "relax",
]
