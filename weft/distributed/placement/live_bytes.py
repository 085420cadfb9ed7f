"""Bytes that a rank keeps alive of parameters, gradients and optimizer state, as they are and not as they should be.

A tensor counts with all of the memory that it keeps from being freed, which is more than its own where it is a view;
memory that several share counts once. weft/planning/placement_cost.py has the formula to compare with.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.sharded_model import ShardedModel
from weft.planning.placement_cost import Held
from weft.training.optimizers import OptimizerState

__all__ = ["bytes_kept_by", "live_bytes"]


def bytes_kept_by(tensors: Iterable[Tensor]) -> int:
    """
    >>> import torch
    >>> whole = torch.zeros(100)
    >>> bytes_kept_by([whole[:10], whole[50:]])
    400
    """
    return sum({storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}.values())


def live_bytes(
    replicas: DataParallel,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    state: OptimizerState,
) -> Held:
    """Of this rank, while gradients wait for the update: with the memory that the exchange and the placement keep for
    the next step.

    Args:
        replicas: that have joined.
        parameters: of the model's state.
        gradients: that the update is given.
        state: of the optimizer.
    """
    kept = list(parameters.values())
    if isinstance(replicas.placement, ShardedModel):
        kept += replicas.placement.blocks.memory()
    given = [gradient for gradient in gradients.values() if gradient is not None]
    return Held(bytes_kept_by(kept), bytes_kept_by([*given, *replicas.exchange.memory()]), state.num_bytes)
