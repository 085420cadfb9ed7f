"""Placement: how data is split among ranks, and gradients exchanged."""

from weft.distributed.placement.all_reduce import AllReduceExchange
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.mesh import MeshGroups

__all__ = ["AllReduceExchange", "DataParallel", "MeshGroups"]
