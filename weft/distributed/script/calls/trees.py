"""Values of a script as bytes: tensors, numbers and texts, in dicts, lists and tuples. Nothing is pickled.

    {"loss": 0.5, "scores": tensor}   ->   outline ["dict", [["loss", 0.5], ["scores", ["tensor", "float32", [3]]]]]
                                           tensors [tensor]

An outline is JSON and has the plain values in it; the tensors travel beside it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.distributed.group.dense import as_bytes, make_dense
from weft.errors import UsageError

__all__ = [
    "Outline",
    "as_json",
    "joined_bytes",
    "leaves_of",
    "num_bytes",
    "outline_of",
    "split_bytes",
    "tensors_of",
    "value_of",
    "walk",
]

Outline = Any
"""JSON: None, a bool, number or text, or [kind, ...]."""

ALIGNMENT = 16
"""Bytes: where a tensor may begin, whatever its type."""

CURE = "give tensors, numbers, texts, and dicts, lists or tuples of them"


def outline_of(value: Any) -> tuple[Outline, list[Tensor]]:
    """A value, and its tensors apart.

    >>> outline_of({"loss": 0.5, "scores": torch.zeros(3)})
    (['dict', [['loss', 0.5], ['scores', ['tensor', 'float32', [3]]]]], [tensor([0., 0., 0.])])
    """
    tensors: list[Tensor] = []
    return _outline(value, tensors), tensors


def _outline(value: Any, tensors: list[Tensor]) -> Outline:
    match value:
        case Tensor():
            return _outline_of_tensor("tensor", value, tensors)
        case np.ndarray() if value.dtype.kind in "biufc":
            return _outline_of_tensor("array", torch.from_numpy(np.ascontiguousarray(value)), tensors)
        case np.generic() if value.dtype.kind in "biuf":
            return value.item()
        case None | bool() | int() | float() | str():
            return value
        case dict() if all(isinstance(key, str | int) for key in value):
            return ["dict", [[key, _outline(item, tensors)] for key, item in value.items()]]
        case list():
            return ["list", [_outline(item, tensors) for item in value]]
        case tuple() if not hasattr(value, "_fields"):
            return ["tuple", [_outline(item, tensors) for item in value]]
        case _:
            raise UsageError(f"value cannot travel between ranks (type: {type(value).__name__}); {CURE}")


def _outline_of_tensor(kind: str, tensor: Tensor, tensors: list[Tensor]) -> Outline:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"tensor cannot travel between ranks (layout: {tensor.layout}); use tensor.to_dense()")
    tensors.append(tensor)
    return [kind, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def walk(outline: Outline, leaf: Callable[[Outline], Any]) -> Any:
    """The value that an outline stands for, with `leaf` for its tensors and plain values, in order."""
    match outline:
        case ["dict", items]:
            return {key: walk(item, leaf) for key, item in items}
        case ["list", items]:
            return [walk(item, leaf) for item in items]
        case ["tuple", items]:
            return tuple(walk(item, leaf) for item in items)
        case _:
            return leaf(outline)


def leaves_of(outline: Outline) -> list[Outline]:
    """Those of tensors and plain values, in order.

    >>> leaves_of(["dict", [["loss", 0.5], ["scores", ["tensor", "float32", [3]]]]])
    [0.5, ['tensor', 'float32', [3]]]
    """
    leaves: list[Outline] = []
    walk(outline, leaves.append)
    return leaves


def value_of(outline: Outline, tensors: Sequence[Tensor]) -> Any:
    """The value of an outline and its tensors."""
    left = iter(tensors)

    def leaf(outline: Outline) -> Any:
        match outline:
            case ["tensor", *_]:
                return next(left)
            case ["array", *_]:
                return next(left).numpy()
            case _:
                return outline

    return walk(outline, leaf)


def tensors_of(outline: Outline) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor, in order."""
    for leaf in leaves_of(outline):
        match leaf:
            case ["tensor" | "array", str(name), list(shape)]:
                yield getattr(torch, name), tuple(shape)


def num_bytes(outline: Outline) -> int:
    """Bytes of all tensors, as `joined_bytes` puts them together."""
    return sum(_padded(prod(shape) * dtype.itemsize) for dtype, shape in tensors_of(outline))


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of any device as one vector of bytes on the CPU, each at a multiple of `ALIGNMENT`."""
    joined = torch.empty(sum(_padded(tensor.numel() * tensor.element_size()) for tensor in tensors), dtype=torch.uint8)
    first = 0
    for tensor in (tensor for tensor in tensors if tensor.numel()):  # strides of an empty one may be anything
        data = as_bytes(make_dense(tensor.detach().cpu()))
        joined[first : first + len(data)] = data
        first += _padded(len(data))
    return joined


def split_bytes(joined: Tensor, outline: Outline) -> list[Tensor]:
    """The tensors of an outline, as views on their bytes."""
    tensors, first = [], 0
    for dtype, shape in tensors_of(outline):
        length = prod(shape) * dtype.itemsize
        tensors.append(joined[first : first + length].view(dtype).view(shape))
        first += _padded(length)
    return tensors


def _padded(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
