"""Variants of a sample's inputs: other layouts in memory, empty, and stretched by broadcasting."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Variant", "as_layout", "broadcast_variants", "empty_variants", "layout_variants"]

LAYOUTS = ("transposed", "every second", "expanded")


@dataclass(frozen=True)
class Variant:
    """Changed inputs, and what was changed."""

    label: str
    inputs: tuple[Any, ...]


def as_layout(tensor: Tensor, layout: str) -> Tensor | None:
    """The tensor with its elements elsewhere in memory; None where it has no such layout.

    An expanded tensor has other values: its first row, shown many times.
    """
    if layout == "transposed":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order) if tensor.dim() > 1 else None
    if tensor.dim() == 0:
        return None
    if layout == "every second":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype, device=tensor.device)
        view = wide[..., 1::2]
        view.copy_(tensor)
        return view
    return tensor[:1].expand_as(tensor) if tensor.shape[0] > 1 else None


def layout_variants(inputs: Sequence[Any]) -> Iterator[Variant]:
    """One input at a time in each layout."""
    for i, value in _tensors(inputs):
        for layout in LAYOUTS:
            moved = as_layout(value, layout)
            if moved is not None and not moved.is_contiguous():
                yield _replaced(inputs, {i: moved}, f"input {i} {layout}")


def empty_variants(inputs: Sequence[Any]) -> Iterator[Variant]:
    """Every size in turn set to 0, in all inputs that have it and in one alone."""
    sizes = dict.fromkeys(size for _, value in _tensors(inputs) for size in value.shape if size)
    for size in sizes:
        places = {i: tuple(d for d, n in enumerate(value.shape) if n == size) for i, value in _tensors(inputs)}
        changed = {i: _narrowed(inputs[i], dims, 0) for i, dims in places.items() if dims}
        yield _replaced(inputs, changed, f"size {size} set to 0")
    for i, value in _tensors(inputs):
        for dim in range(value.dim()):
            yield _replaced(inputs, {i: _narrowed(value, (dim,), 0)}, f"input {i} dimension {dim} set to 0")


def broadcast_variants(inputs: Sequence[Any]) -> Iterator[Variant]:
    """Every dimension of one input at a time set to 1, and its first dimension left out."""
    for i, value in _tensors(inputs):
        for dim in range(value.dim()):
            if value.shape[dim] > 1:
                yield _replaced(inputs, {i: _narrowed(value, (dim,), 1)}, f"input {i} dimension {dim} set to 1")
        if value.dim() > 0 and value.shape[0] > 0:
            yield _replaced(inputs, {i: value[0].clone()}, f"input {i} without dimension 0")


def _tensors(inputs: Sequence[Any]) -> list[tuple[int, Tensor]]:
    return [(i, value) for i, value in enumerate(inputs) if isinstance(value, Tensor)]


def _narrowed(tensor: Tensor, dims: Sequence[int], size: int) -> Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, size)
    return tensor.clone(memory_format=torch.contiguous_format)


def _replaced(inputs: Sequence[Any], changed: dict[int, Tensor], label: str) -> Variant:
    return Variant(label, tuple(changed.get(i, value) for i, value in enumerate(inputs)))
