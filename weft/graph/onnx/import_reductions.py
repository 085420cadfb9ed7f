"""ONNX operators that reduce or normalise, in torch."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.errors import GraphError
from weft.graph.onnx.import_operator import Attributes, ImportedOperator

__all__ = ["TABLE"]

Reduction = Callable[[Tensor, tuple[int, ...], bool], Tensor]


def _reduction(reduce: Reduction) -> ImportedOperator:
    """Axes are an input, or an attribute in old versions; none at all means all, or nothing if so wished."""

    def function(attributes: Attributes, x: Tensor, given: Sequence[int] | None = None) -> Tensor:
        axes = given if given is not None else attributes.get("axes", [])
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return reduce(x.unsqueeze(-1), (-1,), False)  # what it does besides reducing, such as a square, stays
        dims = tuple(axes) or tuple(range(x.ndim))
        return reduce(x, dims, bool(attributes.get("keepdims", 1))) if dims else reduce(x.reshape(1), (0,), False)

    return ImportedOperator(function, frozenset({1}))


def _product(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    for dim in sorted((dim % x.ndim for dim in dims), reverse=True):
        x = torch.prod(x, dim, keepdim=keep)
    return x


def _extreme(extreme: Callable[..., Tensor], empty: float) -> Reduction:
    def reduce(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
        if x.numel():
            return extreme(x, dims, keepdim=keep)
        found = torch.full_like(x.to(torch.float64).sum(dims, keepdim=keep), empty)
        return found > 0 if x.dtype == torch.bool else found.to(x.dtype)

    return reduce


def _sum(x: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:
    return x.sum(dims, keepdim=keep, dtype=x.dtype)


def _place(place: Callable[..., Tensor]) -> ImportedOperator:
    def function(attributes: Attributes, x: Tensor) -> Tensor:
        axis = attributes.get("axis", 0)
        if not attributes.get("select_last_index", 0):
            return place(x, axis, keepdim=bool(attributes.get("keepdims", 1)))
        last = place(x.flip(axis), axis, keepdim=bool(attributes.get("keepdims", 1)))
        return x.shape[axis] - 1 - last

    return ImportedOperator(function)


def _softmax(function: Callable[..., Tensor]) -> ImportedOperator:
    return ImportedOperator(lambda attributes, x: function(x, attributes.get("axis", -1)))


def _cumsum(attributes: Attributes, x: Tensor, axis: Sequence[int]) -> Tensor:
    (dim,) = axis
    x = x.flip(dim) if attributes.get("reverse", 0) else x
    total = x.cumsum(dim, dtype=x.dtype)
    total = total - x if attributes.get("exclusive", 0) else total
    return total.flip(dim) if attributes.get("reverse", 0) else total


def _batch_norm(
    attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if attributes.get("training_mode", 0):
        raise GraphError("an imported BatchNormalization does not train; export the model for inference")
    return torch.batch_norm(x, scale, bias, mean, variance, False, 0.0, attributes.get("epsilon", 1e-5), False)


def _instance_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, attributes.get("epsilon", 1e-5), False)


def _layer_norm(
    attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(attributes.get("axis", -1) % x.ndim, x.ndim))
    mean = x.mean(dims, keepdim=True)
    inverse = (x.var(dims, keepdim=True, correction=0) + attributes.get("epsilon", 1e-5)).rsqrt()
    y = (x - mean) * inverse * scale
    return (y if bias is None else y + bias), mean, inverse


def _rms_norm(attributes: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    dims = tuple(range(attributes.get("axis", -1) % x.ndim, x.ndim))
    epsilon: float = attributes.get("epsilon", 1e-5)
    return x * (x.square().mean(dims, keepdim=True) + epsilon).rsqrt() * scale


def _group_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.group_norm(x, attributes["num_groups"], scale, bias, attributes.get("epsilon", 1e-5), False)


def _top_k(attributes: Attributes, x: Tensor, count: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Of equal values the one with the lower index comes first, which torch.topk does not promise."""
    axis, largest = attributes.get("axis", -1), bool(attributes.get("largest", 1))
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count[0]), places.narrow(axis, 0, count[0])


TABLE: Mapping[str, ImportedOperator] = {
    "ArgMax": _place(torch.argmax),
    "ArgMin": _place(torch.argmin),
    "BatchNormalization": ImportedOperator(_batch_norm),
    "CumSum": ImportedOperator(_cumsum, frozenset({1})),
    "GroupNormalization": ImportedOperator(_group_norm),
    "InstanceNormalization": ImportedOperator(_instance_norm),
    "LayerNormalization": ImportedOperator(_layer_norm),
    "LogSoftmax": _softmax(torch.log_softmax),
    "RMSNormalization": ImportedOperator(_rms_norm),
    "ReduceL1": _reduction(lambda x, dims, keep: _sum(x.abs(), dims, keep)),
    "ReduceL2": _reduction(lambda x, dims, keep: _sum(x.square(), dims, keep).sqrt()),
    "ReduceLogSum": _reduction(lambda x, dims, keep: _sum(x, dims, keep).log()),
    "ReduceLogSumExp": _reduction(lambda x, dims, keep: torch.logsumexp(x, dims, keepdim=keep)),
    "ReduceMax": _reduction(_extreme(torch.amax, float("-inf"))),
    "ReduceMean": _reduction(lambda x, dims, keep: x.mean(dims, keepdim=keep)),
    "ReduceMin": _reduction(_extreme(torch.amin, float("inf"))),
    "ReduceProd": _reduction(_product),
    "ReduceSum": _reduction(_sum),
    "ReduceSumSquare": _reduction(lambda x, dims, keep: _sum(x.square(), dims, keep)),
    "Softmax": _softmax(torch.softmax),
    "TopK": ImportedOperator(_top_k, frozenset({1})),
}
