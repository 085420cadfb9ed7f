"""Placement: how data, the optimizer's state and its updates are split among ranks, and gradients exchanged."""

from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.exchange import GradientExchange
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.sharded import ShardedState
from weft.distributed.placement.sharded_model import ShardedModel

__all__ = ["DataParallel", "GradientExchange", "MeshGroups", "ShardedModel", "ShardedState"]
