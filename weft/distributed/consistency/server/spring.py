"""The spring of elastic averaging: what both of its ends move by (EASGD, Zhang, Choromanska and LeCun, 2015)."""

from torch import Tensor

__all__ = ["spring"]


def spring(visitor: Tensor, centre: Tensor, alpha: float) -> Tensor:
    """alpha (x - centre): the centre moves by as much towards the visitor, and the visitor by as much towards it. The
    same bits on both ends, in whatever pieces it is computed.

    >>> import torch
    >>> spring(torch.tensor([3.0]), torch.tensor([1.0]), 0.25)
    tensor([0.5000])
    """
    return (visitor - centre).mul_(alpha)
