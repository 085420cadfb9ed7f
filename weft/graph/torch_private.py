"""Private names of PyTorch, kept in one file because the pinned version is all that vouches for them."""

import torch
from torch import Tensor

__all__ = ["shares_memory"]


def shares_memory(tensor: Tensor) -> bool:
    """Whether anything else holds the tensor's memory: another tensor, or a node of autograd."""
    if tensor.layout is not torch.strided:
        return True
    storage = tensor.untyped_storage()
    # Two holders are ours: the tensor, and the storage object that was just made to ask.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)
