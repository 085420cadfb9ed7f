"""The cost of an operator as data: floating-point operations, bytes read and written, scratch memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cost", "CostFormula", "tensor_bytes"]


@dataclass(frozen=True)
class Cost:
    """The cost of one call, from its shapes alone.

    A multiplication and an addition are two operations. Bytes are those that must move if nothing is in a cache.

    >>> total = Cost(flops=10, bytes_read=8, bytes_written=4) + Cost(flops=2, bytes_read=4, bytes_written=4)
    >>> total, total.intensity
    (Cost(flops=12, bytes_read=12, bytes_written=8, workspace=0), 0.6)
    """

    flops: int
    bytes_read: int
    bytes_written: int
    workspace: int = 0  # bytes beside inputs and outputs, needed while the call lasts

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of one call after the other: scratch memory is given back in between."""
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            max(self.workspace, other.workspace),
        )

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Operations per byte moved; infinite where nothing moves."""
        return self.flops / self.bytes_moved if self.bytes_moved else float("inf")


CostFormula = Callable[..., Cost]
"""Takes what the operator takes."""


def tensor_bytes(*tensors: Tensor) -> int:
    """Bytes of the elements; one that an expanded tensor shows many times counts once.

    >>> tensor_bytes(torch.empty(4, 3), torch.empty(1, 3).expand(4, 3))
    60
    """
    return sum(_num_stored(tensor) * tensor.element_size() for tensor in tensors)


def _num_stored(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return tensor.numel()
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride != 0 or size == 0 else 1
    return count
