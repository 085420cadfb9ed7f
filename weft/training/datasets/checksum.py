"""The checksum of tensors."""

import hashlib

from torch import Tensor

__all__ = ["checksum_of"]


def checksum_of(*tensors: Tensor) -> str:
    """SHA-256 over the type, shape and bytes of every tensor.

    >>> import torch
    >>> checksum_of(torch.zeros(2, 3)) == checksum_of(torch.zeros(3, 2))
    False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
