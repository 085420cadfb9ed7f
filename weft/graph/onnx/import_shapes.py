"""ONNX operators that make, move and pick elements, in torch."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.graph.onnx.import_operator import Attributes, ImportedOperator, plain
from weft.graph.onnx.tensor_types import tensor_of

__all__ = ["TABLE"]

Numbers = Sequence[int]


def _reshape(attributes: Attributes, x: Tensor, shape: Numbers) -> Tensor:
    """0 keeps a size, unless it is said to mean zero."""
    keeps = not attributes.get("allowzero", 0)
    return x.reshape([x.shape[i] if size == 0 and keeps else size for i, size in enumerate(shape)])


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    lead = x.shape[: axis if axis >= 0 else axis + x.ndim]
    return x.reshape(int(torch.Size(lead).numel()), -1) if x.numel() else x.reshape(torch.Size(lead).numel(), 0)


def _transpose(attributes: Attributes, x: Tensor) -> Tensor:
    return x.permute(attributes.get("perm", list(range(x.ndim))[::-1]))


def _squeeze(attributes: Attributes, x: Tensor, given: Numbers | None = None) -> Tensor:
    axes = given if given is not None else attributes.get("axes", None)
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def _unsqueeze(attributes: Attributes, x: Tensor, given: Numbers | None = None) -> Tensor:
    axes = given if given is not None else attributes["axes"]
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(attributes: Attributes, *parts: Tensor) -> Tensor:
    return torch.cat(parts, attributes["axis"])


def _split(attributes: Attributes, x: Tensor, given: Numbers | None = None) -> Sequence[Tensor]:
    """By sizes, or into a number of parts of which the last may be smaller."""
    axis = attributes.get("axis", 0)
    sizes = given if given is not None else attributes.get("split", None)
    if sizes is not None:
        return torch.split(x, list(sizes), axis)
    count = attributes.get("num_outputs", attributes["outputs"])
    return torch.split(x, -(-x.shape[axis] // count), axis)


def _slice(
    attributes: Attributes,
    x: Tensor,
    starts: Numbers | None = None,
    ends: Numbers | None = None,
    axes: Numbers | None = None,
    steps: Numbers | None = None,
) -> Tensor:
    starts, ends = attributes.get("starts", starts), attributes.get("ends", ends)
    axes = attributes.get("axes", axes) or list(range(len(starts)))
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(starts), strict=True):
        places = range(x.shape[axis])[start:end:step]
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


def _gather(attributes: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.ndim
    flat = torch.where(index < 0, index + x.shape[axis], index).long().flatten()
    found = x.index_select(axis, flat)
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


def _gather_elements(attributes: Attributes, x: Tensor, index: Tensor) -> Tensor:
    axis = attributes.get("axis", 0)
    return x.gather(axis, torch.where(index < 0, index + x.shape[axis], index).long())


def _gather_nd(attributes: Attributes, x: Tensor, index: Tensor) -> Tensor:
    lead = attributes.get("batch_dims", 0)
    places = index.long().unbind(-1)
    own = [torch.arange(n).reshape([-1] + [1] * (index.ndim - 2 - dim)) for dim, n in enumerate(x.shape[:lead])]
    return x[(*own, *places)]


def _scatter_elements(attributes: Attributes, x: Tensor, index: Tensor, updates: Tensor) -> Tensor:
    axis, how = attributes.get("axis", 0), attributes.get("reduction", "none")
    places = torch.where(index < 0, index + x.shape[axis], index).long()
    if how == "none":
        return x.scatter(axis, places, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, places, updates, names[how])


def _expand(x: Tensor, shape: Numbers) -> Tensor:
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape)))


def _pad(
    attributes: Attributes, x: Tensor, pads: Numbers, value: Tensor | None = None, axes: Numbers | None = None
) -> Tensor:
    places = [axis % x.ndim for axis in axes] if axes is not None else list(range(x.ndim))
    before, after = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(places):
        before[axis], after[axis] = pads[i], pads[i + len(places)]
    mode = attributes.get("mode", "constant")
    if mode == "constant":
        pairs = [n for low, high in zip(before[::-1], after[::-1], strict=True) for n in (low, high)]
        return F.pad(x, pairs, value=0 if value is None else value.item())
    for axis, (low, high) in enumerate(zip(before, after, strict=True)):
        if low or high:
            x = x.index_select(axis, _beyond(x.shape[axis], low, high, mode))
    return x


def _beyond(size: int, low: int, high: int, mode: str) -> Tensor:
    """The indices of the elements that stand for those from -low to size + high."""
    places = torch.arange(-low, size + high)
    if mode == "edge":
        return places.clamp(0, size - 1)
    if mode == "wrap":
        return places % size
    turn = max(2 * (size - 1), 1)
    folded = places % turn
    return torch.where(folded < size, folded, turn - folded)


def _constant(attributes: Attributes) -> Tensor:
    if "value" in attributes:
        return tensor_of(attributes["value"])
    (key, value) = next((k, v) for k, v in attributes.items() if k.startswith("value_"))
    dtype = torch.float32 if key.startswith("value_float") else torch.int64
    return torch.tensor(value, dtype=dtype)


def _constant_of_shape(attributes: Attributes, shape: Numbers) -> Tensor:
    value = tensor_of(attributes["value"]) if "value" in attributes else torch.zeros(1)
    return value.reshape(()).expand(tuple(shape)).clone()


def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[attributes.get("start", 0) : attributes.get("end", None)], dtype=torch.int64)


def _range(_attributes: Attributes, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def _one_hot(attributes: Attributes, index: Tensor, depth: Numbers, values: Tensor) -> Tensor:
    axis, count = attributes.get("axis", -1), int(depth[0])
    places = torch.where(index < 0, index + count, index).long()
    hot = places.unsqueeze(axis) == torch.arange(count).reshape(
        [-1 if i == axis % (index.ndim + 1) else 1 for i in range(index.ndim + 1)]
    )
    return torch.where(hot, values[1], values[0])


def _trilu(attributes: Attributes, x: Tensor, diagonal: Numbers | None = None) -> Tensor:
    offset = diagonal[0] if diagonal else 0
    return x.triu(offset) if attributes.get("upper", 1) else x.tril(offset)


def _depth_to_space(attributes: Attributes, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    size = attributes["blocksize"]
    if attributes.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    parts = x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(n, c // size**2, h * size, w * size)


def _space_to_depth(attributes: Attributes, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    size = attributes["blocksize"]
    if attributes.get("mode", "DCR") == "CRD":
        return F.pixel_unshuffle(x, size)
    parts = x.reshape(n, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * size**2, h // size, w // size)


def _static(*places: int) -> frozenset[int]:
    return frozenset(places)


TABLE: Mapping[str, ImportedOperator] = {
    "Concat": ImportedOperator(_concat),
    "Constant": ImportedOperator(_constant),
    "ConstantOfShape": ImportedOperator(_constant_of_shape, _static(0)),
    "DepthToSpace": ImportedOperator(_depth_to_space),
    "Expand": ImportedOperator(lambda _attributes, x, shape: _expand(x, shape), _static(1)),
    "Flatten": ImportedOperator(_flatten),
    "Gather": ImportedOperator(_gather),
    "GatherElements": ImportedOperator(_gather_elements),
    "GatherND": ImportedOperator(_gather_nd),
    "OneHot": ImportedOperator(_one_hot, _static(1)),
    "Pad": ImportedOperator(_pad, _static(1, 3)),
    "Range": ImportedOperator(_range),
    "Reshape": ImportedOperator(_reshape, _static(1)),
    "ScatterElements": ImportedOperator(_scatter_elements),
    "Shape": ImportedOperator(_shape),
    "Size": plain(lambda x: torch.tensor(x.numel(), dtype=torch.int64)),
    "Slice": ImportedOperator(_slice, _static(1, 2, 3, 4)),
    "SpaceToDepth": ImportedOperator(_space_to_depth),
    "Split": ImportedOperator(_split, _static(1)),
    "Squeeze": ImportedOperator(_squeeze, _static(1)),
    "Tile": ImportedOperator(lambda _attributes, x, repeats: x.repeat(tuple(repeats)), _static(1)),
    "Transpose": ImportedOperator(_transpose),
    "Trilu": ImportedOperator(_trilu, _static(1)),
    "Unsqueeze": ImportedOperator(_unsqueeze, _static(1)),
}
