"""Tensors as transports want them: dense, as bytes, and reduced in rank order."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from weft.distributed.group.calls import ReduceOp, Sizes

__all__ = [
    "HALVES",
    "as_bytes",
    "combine_neighbours",
    "copy_back",
    "make_dense",
    "part_bytes",
    "part_lengths",
    "reduce_parts",
]

HALVES = (torch.float16, torch.bfloat16)


def make_dense(tensor: Tensor) -> Tensor:
    """The tensor, flat and without its history: a view where it is contiguous, a copy where it is not."""
    return tensor.detach().contiguous().view(-1)


def copy_back(tensor: Tensor, dense: Tensor) -> None:
    """Write a dense form into the tensor that it was made from, unless they are the same memory."""
    if tensor.data_ptr() != dense.data_ptr():
        tensor.detach().copy_(dense.view(tensor.shape))


def as_bytes(dense: Tensor) -> Tensor:
    """A flat tensor as bytes, so that every type can be moved by a transport that knows few."""
    return dense.view(torch.uint8)


def part_lengths(whole: Tensor, sizes: Sizes) -> tuple[int, ...]:
    """Elements of parts of so many rows each.

    >>> part_lengths(torch.empty(3, 4), (2, 0, 1))
    (8, 0, 4)
    """
    row = prod(whole.shape[1:])
    return tuple(size * row for size in sizes)


def part_bytes(whole: Tensor, sizes: Sizes) -> tuple[int, ...]:
    """Bytes of parts of so many rows each."""
    width = whole.element_size()
    return tuple(length * width for length in part_lengths(whole, sizes))


def reduce_parts(parts: Tensor, op: ReduceOp) -> Tensor:
    """Reduce along dimension 0 in order, ((x0 + x1) + x2) + ...; 16-bit floats in 32 bits, rounded once.

    >>> reduce_parts(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), "mean")
    tensor([2., 4.])
    """
    total = parts[0].to(torch.float32 if parts.dtype in HALVES else parts.dtype, copy=True)
    for part in parts[1:]:
        match op:
            case "sum" | "mean":
                total += part
            case "min":
                torch.minimum(total, part.to(total.dtype), out=total)
            case "max":
                torch.maximum(total, part.to(total.dtype), out=total)
            case "product":
                total *= part
    if op == "mean":
        total /= len(parts)
    return total.to(parts.dtype)


def combine_neighbours(own: Tensor, others: Iterable[Tensor], weights: tuple[float, ...]) -> None:
    """In place: `weights[0]` times the own tensor plus `weights[1 + i]` times `others[i]`, in that order."""
    own.mul_(weights[0])
    for other, weight in zip(others, weights[1:], strict=True):
        own.add_(other, alpha=weight)
