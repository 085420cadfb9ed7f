"""ATen operators as ONNX nodes: what forward graphs are made of. Each function adds nodes and names their outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from weft.graph.onnx.builder import Builder, Export, Input, value_of
from weft.graph.onnx.export_layers import LAYERS

__all__ = ["EXPORTS"]


def _ndim(node: fx.Node) -> int:
    return value_of(node).ndim


def _plain(kind: str, **attributes: Any) -> Export:
    return lambda b, node, x, *_, **__: b(kind, x, **attributes)


def _operand(b: Builder, value: Any, dtype: torch.dtype) -> Input:
    return b.cast(value, dtype) if isinstance(value, fx.Node) else b.constant(value, dtype)


def _binary(kind: str) -> Export:
    def export(b: Builder, node: fx.Node, x: Any, y: Any, alpha: Any = 1, **_: Any) -> str:
        dtype = value_of(node).dtype
        right = _operand(b, y, dtype)
        if alpha != 1:
            right = b("Mul", right, b.constant(alpha, dtype))
        return b(kind, _operand(b, x, dtype), right)

    return export


def _comparison(kind: str, negated: bool = False) -> Export:
    def export(b: Builder, _node: fx.Node, x: fx.Node, y: Any) -> str:
        other = value_of(y) if isinstance(y, fx.Node) else y
        dtype = torch.result_type(value_of(x), other)
        found = b(kind, _operand(b, x, dtype), _operand(b, y, dtype))
        return b("Not", found) if negated else found

    return export


def _rsub(b: Builder, node: fx.Node, x: fx.Node, y: Any, alpha: Any = 1) -> str:
    dtype = value_of(node).dtype
    scaled = x if alpha == 1 else b("Mul", x, b.constant(alpha, dtype))
    return b("Sub", _operand(b, y, dtype), scaled)


def _addmm(b: Builder, _node: fx.Node, c: fx.Node, x: fx.Node, y: fx.Node, *, beta: float = 1, alpha: float = 1) -> str:
    return b("Gemm", x, y, c, alpha=float(alpha), beta=float(beta))


def _reshape(b: Builder, node: fx.Node, x: fx.Node, *_: Any) -> str:
    return b("Reshape", x, b.constant([int(size) for size in value_of(node).shape]), allowzero=1)


def _expand(b: Builder, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> str:
    return b("Expand", x, b.constant([int(size) for size in value_of(node).shape]))


def _permute(b: Builder, _node: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    return b("Transpose", x, perm=[dim % len(dims) for dim in dims])


def _transpose(b: Builder, _node: fx.Node, x: fx.Node, first: int, second: int) -> str:
    order = list(range(_ndim(x)))
    order[first], order[second] = order[second], order[first]
    return b("Transpose", x, perm=order)


def _t(b: Builder, _node: fx.Node, x: fx.Node) -> str:
    return b("Transpose", x, perm=[1, 0]) if _ndim(x) == 2 else b("Identity", x)


def _slice(b: Builder, _node: fx.Node, x: fx.Node, dim: int = 0, *bounds: int | None) -> str:
    """`bounds` are start, end and step, each of which may be missing."""
    start, end, step = (*bounds, None, None, None)[:3]
    last = torch.iinfo(torch.int64).max if end is None else end
    return b("Slice", x, *(b.constant([value]) for value in (start or 0, last, dim, step or 1)))


def _select(b: Builder, _node: fx.Node, x: fx.Node, dim: int, index: int) -> str:
    return b("Gather", x, b.constant(index), axis=dim)


def _cat(b: Builder, _node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> str:
    return b("Concat", *parts, axis=dim)


def _stack(b: Builder, _node: fx.Node, parts: Sequence[fx.Node], dim: int = 0) -> str:
    axes = b.constant([dim])
    return b("Concat", *(b("Unsqueeze", part, axes) for part in parts), axis=dim)


def _split(b: Builder, node: fx.Node, x: fx.Node, _sizes: Any, dim: int = 0) -> list[str]:
    sizes = [int(part.shape[dim]) for part in node.meta["val"]]
    return b.several("Split", len(sizes), x, b.constant(sizes), axis=dim)


def _pad(b: Builder, _node: fx.Node, x: fx.Node, pad: Sequence[int], value: Any = 0) -> str:
    """torch's pairs go from the last dimension backwards, ONNX has all beginnings, then all ends."""
    ndim = _ndim(x)
    before = [0] * (ndim - len(pad) // 2) + list(pad[::2])[::-1]
    after = [0] * (ndim - len(pad) // 2) + list(pad[1::2])[::-1]
    return b("Pad", x, b.constant(before + after), b.constant(value, value_of(x).dtype))


def _reduce(kind: str) -> Export:
    def export(b: Builder, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False, **_: Any) -> str:
        axes = [dims] if isinstance(dims, int) else list(dims or [])
        given = b.cast(x, value_of(node).dtype)
        return b(kind, given, b.constant(axes) if axes else None, keepdims=int(keepdim))

    return export


def _softmax(kind: str) -> Export:
    return lambda b, node, x, dim, *_: b(kind, x, axis=dim)


def _clamp(b: Builder, node: fx.Node, x: fx.Node, low: Any = None, high: Any = None) -> str:
    dtype = value_of(node).dtype
    low, high = (None if bound is None else b.constant(bound, dtype) for bound in (low, high))
    return b("Clip", b.cast(x, dtype), low, high)


def _where(b: Builder, node: fx.Node, mask: fx.Node, x: Any, y: Any) -> str:
    dtype = value_of(node).dtype
    return b("Where", mask, _operand(b, x, dtype), _operand(b, y, dtype))


def _masked_fill(b: Builder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Any) -> str:
    return _where(b, node, mask, value, x)


def _full(b: Builder, node: fx.Node, _like: Any, fill: Any, **_: Any) -> str:
    value = value_of(node)
    return b.constant(torch.full([int(size) for size in value.shape], fill, dtype=value.dtype))


def _filled(fill: float) -> Export:
    return lambda b, node, *_, **__: _full(b, node, None, fill)


def _arange(b: Builder, node: fx.Node, *bounds: Any, **_: Any) -> str:
    return b.constant(torch.arange(*bounds, dtype=value_of(node).dtype))


def _over(names: str, export: Export) -> dict[str, Export]:
    return {f"aten.{name}": export for name in names.split()}


_UNARY = {
    "abs": "Abs",
    "bitwise_not": "Not",
    "ceil": "Ceil",
    "cos": "Cos",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "logical_not": "Not",
    "neg": "Neg",
    "reciprocal": "Reciprocal",
    "relu": "Relu",
    "round": "Round",
    "sigmoid": "Sigmoid",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
}

EXPORTS: dict[str, Export] = {
    **LAYERS,
    **{f"aten.{name}.default": _plain(kind) for name, kind in _UNARY.items()},
    **_over("add.Tensor add.Scalar", _binary("Add")),
    **_over("sub.Tensor sub.Scalar", _binary("Sub")),
    **_over("mul.Tensor mul.Scalar", _binary("Mul")),
    **_over("div.Tensor div.Scalar", _binary("Div")),
    **_over("pow.Tensor_Scalar pow.Tensor_Tensor", _binary("Pow")),
    **_over("rsub.Tensor rsub.Scalar", _rsub),
    **_over("eq.Tensor eq.Scalar", _comparison("Equal")),
    **_over("ne.Tensor ne.Scalar", _comparison("Equal", negated=True)),
    **_over("lt.Tensor lt.Scalar", _comparison("Less")),
    **_over("le.Tensor le.Scalar", _comparison("LessOrEqual")),
    **_over("gt.Tensor gt.Scalar", _comparison("Greater")),
    **_over("ge.Tensor ge.Scalar", _comparison("GreaterOrEqual")),
    **_over("maximum.default", _binary("Max")),
    **_over("minimum.default", _binary("Min")),
    **_over("logical_and.default bitwise_and.Tensor", lambda b, node, x, y: b("And", x, y)),
    **_over("logical_or.default bitwise_or.Tensor", lambda b, node, x, y: b("Or", x, y)),
    **_over("alias.default clone.default contiguous.default detach.default", _plain("Identity")),
    **_over("lift_fresh_copy.default", _plain("Identity")),
    **_over("view.default _unsafe_view.default reshape.default", _reshape),
    **_over("unsqueeze.default squeeze.default squeeze.dim squeeze.dims", _reshape),
    **_over("mm.default bmm.default mv.default", lambda b, node, x, y: b("MatMul", x, y)),
    **_over("split.Tensor split_with_sizes.default", _split),
    **_over("sum.default sum.dim_IntList", _reduce("ReduceSum")),
    **_over("mean.default mean.dim", _reduce("ReduceMean")),
    **_over("where.self where.ScalarOther where.ScalarSelf where.Scalar", _where),
    **_over("masked_fill.Scalar masked_fill.Tensor", _masked_fill),
    **_over("zeros_like.default zeros.default new_zeros.default", _filled(0)),
    **_over("ones_like.default ones.default new_ones.default", _filled(1)),
    **_over("full_like.default full.default", _full),
    **_over("arange.default arange.start arange.start_step", _arange),
    "aten._log_softmax.default": _softmax("LogSoftmax"),
    "aten._softmax.default": _softmax("Softmax"),
    "aten._to_copy.default": lambda b, node, x, **_: b.name(b.cast(x, value_of(node).dtype)),
    "aten.addmm.default": _addmm,
    "aten.amax.default": _reduce("ReduceMax"),
    "aten.amin.default": _reduce("ReduceMin"),
    "aten.cat.default": _cat,
    "aten.clamp.default": _clamp,
    "aten.constant_pad_nd.default": _pad,
    "aten.elu.default": lambda b, node, x, alpha=1, *_: b("Elu", x, alpha=float(alpha)),
    "aten.embedding.default": lambda b, node, weight, index, *_: b("Gather", weight, index, axis=0),
    "aten.expand.default": _expand,
    "aten.gelu.default": lambda b, node, x, approximate="none": b("Gelu", x, approximate=approximate),
    "aten.index_select.default": lambda b, node, x, dim, index: b("Gather", x, index, axis=dim),
    "aten.leaky_relu.default": lambda b, node, x, slope=0.01: b("LeakyRelu", x, alpha=float(slope)),
    "aten.permute.default": _permute,
    "aten.rsqrt.default": lambda b, node, x: b("Reciprocal", b("Sqrt", x)),
    "aten.select.int": _select,
    "aten.silu.default": lambda b, node, x: b("Mul", x, b("Sigmoid", x)),
    "aten.slice.Tensor": _slice,
    "aten.stack.default": _stack,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
}
