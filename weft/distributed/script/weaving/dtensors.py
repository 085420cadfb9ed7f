"""Tensors of PyTorch that lie in parts on several ranks (DTensor): the part of this rank, and which part it is.

    mesh dim 0, 2 ranks    Shard(0)       rows 0 1 | 2 3
    mesh dim 1, 2 ranks    Shard(1)       of them columns 0 1 | 2 3          rank 1 holds the box [0:2, 2:4]

`torch.distributed.tensor` is not imported here: a script that has such a tensor has imported it.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.checkpoint import Cut, compose, flat, fused_cut, whole_cut

__all__ = ["as_dtensor", "as_trained", "cut_of_dtensor", "is_dtensor", "lay_out_gradient", "local_of", "whole_of"]


def is_dtensor(value: object) -> bool:
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, known.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; the tensor itself if it is no DTensor."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = _as_any(tensor.detach()).to_local()
    return local if _as_any(tensor).device_mesh.get_coordinate() is not None else local.reshape(-1)


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, put together on every rank of its mesh, who all call it."""
    whole: Tensor = _as_any(tensor.detach()).full_tensor() if is_dtensor(tensor) else tensor
    return whole


def as_dtensor(local: Tensor, like: Tensor) -> Tensor:
    """A part as a tensor that lies as another does; as it is if that is no DTensor, or the part none of its shape."""
    if not is_dtensor(like) or local.shape != local_of(like).shape:
        return local
    other = _as_any(like)
    about = {"run_check": False, "shape": other.shape, "stride": other.stride()}
    make = type(other.detach()).from_local
    whole: Tensor = make(local.to(other.device), other.device_mesh, other.placements, **about)
    return whole


def lay_out_gradient(parameter: Tensor) -> None:
    """Bring the gradient of a DTensor to lie as the parameter does: where ranks of its mesh have addends of it, they
    add up. All of them call it."""
    if not is_dtensor(parameter) or not is_dtensor(parameter.grad):
        return
    gradient, wanted = _as_any(parameter.grad), _as_any(parameter).placements
    if gradient.placements != wanted:
        parameter.grad = gradient.redistribute(placements=wanted)


def as_trained(parameter: Tensor) -> Tensor:
    """The part that this rank holds of a parameter, in the same memory; the parameter itself if it is no DTensor."""
    return local_of(parameter).requires_grad_(parameter.requires_grad) if is_dtensor(parameter) else parameter


def cut_of_dtensor(tensor: Tensor) -> Cut:
    """The part that this rank holds; nothing, where it is not of the tensor's mesh.

    Raises:
        UsageError: every rank holds an addend of it.
    """
    other, shape = _as_any(tensor), tuple(tensor.shape)
    coordinate: Sequence[int] | None = other.device_mesh.get_coordinate()
    if coordinate is None:
        return Cut(shape, flat(0, 0))
    if any(placement.is_partial() for placement in other.placements):
        about = f"shape: {shape}, placements: {other.placements}"
        raise UsageError(f"tensor is a sum that nobody has added up ({about}); redistribute it to Shard or Replicate")
    cut = whole_cut(shape)
    for dim in range(len(shape)):
        kept = _indices(shape[dim], dim, other.placements, other.device_mesh.shape, coordinate)
        if kept.numel() != shape[dim]:
            cut = compose(cut, fused_cut(cut.held_shape, dim, _runs(kept)))
    return cut


def _indices(
    size: int, dim: int, placements: Sequence[Any], counts: Sequence[int], coordinate: Sequence[int]
) -> Tensor:
    """The indices of a dimension that this rank holds: mesh dim by mesh dim, as each placement cuts. That of FSDP on a
    dimension that is cut already takes rows from every piece of it."""
    kept = torch.arange(size)
    for placement, count, own in zip(placements, counts, coordinate, strict=True):
        if getattr(placement, "dim", None) == dim:
            view = kept.view(*(1,) * dim, -1)
            pieces, _ = placement._split_tensor(view, count, with_padding=False, contiguous=True)
            kept = pieces[own].reshape(-1)
    return kept


def _runs(indices: Tensor) -> list[tuple[int, int]]:
    """Indices as ranges of those that follow each other.

    >>> _runs(torch.tensor([0, 1, 4, 5, 6]))
    [(0, 2), (4, 7)]
    """
    numbers = indices.tolist()
    if not numbers:
        return [(0, 0)]
    breaks = [i + 1 for i, (one, after) in enumerate(pairwise(numbers)) if after != one + 1]
    return [(numbers[begin], numbers[end - 1] + 1) for begin, end in pairwise([0, *breaks, len(numbers)])]


def _as_any(value: object) -> Any:
    return value
