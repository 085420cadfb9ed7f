"""ATen operators as ONNX nodes: what forward graphs are made of. Each function adds nodes and names their outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.onnx.builder import Builder, Input

__all__ = ["EXPORTS", "Export"]

Export = Callable[..., str | Sequence[str | None]]
"""`(builder, node, *args, **kwargs)`: the arguments are those of the ATen operator."""


def _value(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    first: Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return first


def _ndim(node: fx.Node) -> int:
    return _value(node).ndim


def _plain(kind: str, **attributes: Any) -> Export:
    return lambda b, node, x, *_, **__: b(kind, x, **attributes)


def _operand(b: Builder, value: Any, dtype: torch.dtype) -> Input:
    return b.cast(value, dtype) if isinstance(value, fx.Node) else b.constant(value, dtype)


def _binary(kind: str) -> Export:
    def export(b: Builder, node: fx.Node, x: Any, y: Any, alpha: Any = 1, **_: Any) -> str:
        dtype = _value(node).dtype
        right = _operand(b, y, dtype)
        if alpha != 1:
            right = b("Mul", right, b.constant(alpha, dtype))
        return b(kind, _operand(b, x, dtype), right)

    return export


def _comparison(kind: str, negated: bool = False) -> Export:
    def export(b: Builder, _node: fx.Node, x: fx.Node, y: Any) -> str:
        other = _value(y) if isinstance(y, fx.Node) else y
        dtype = torch.result_type(_value(x), other)
        found = b(kind, _operand(b, x, dtype), _operand(b, y, dtype))
        return b("Not", found) if negated else found

    return export


def _rsub(b: Builder, node: fx.Node, x: fx.Node, y: Any, alpha: Any = 1) -> str:
    dtype = _value(node).dtype
    scaled = x if alpha == 1 else b("Mul", x, b.constant(alpha, dtype))
    return b("Sub", _operand(b, y, dtype), scaled)


def _addmm(b: Builder, _node: fx.Node, c: fx.Node, x: fx.Node, y: fx.Node, *, beta: float = 1, alpha: float = 1) -> str:
    return b("Gemm", x, y, c, alpha=float(alpha), beta=float(beta))


def _reshape(b: Builder, node: fx.Node, x: fx.Node, *_: Any) -> str:
    return b("Reshape", x, b.constant([int(size) for size in _value(node).shape]), allowzero=1)


def _expand(b: Builder, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> str:
    return b("Expand", x, b.constant([int(size) for size in _value(node).shape]))


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
    return b("Pad", x, b.constant(before + after), b.constant(value, _value(x).dtype))


def _reduce(kind: str) -> Export:
    def export(b: Builder, node: fx.Node, x: fx.Node, dims: Any = None, keepdim: bool = False, **_: Any) -> str:
        axes = [dims] if isinstance(dims, int) else list(dims or [])
        given = b.cast(x, _value(node).dtype)
        return b(kind, given, b.constant(axes) if axes else None, keepdims=int(keepdim))

    return export


def _softmax(kind: str) -> Export:
    return lambda b, node, x, dim, *_: b(kind, x, axis=dim)


def _clamp(b: Builder, node: fx.Node, x: fx.Node, low: Any = None, high: Any = None) -> str:
    dtype = _value(node).dtype
    low, high = (None if bound is None else b.constant(bound, dtype) for bound in (low, high))
    return b("Clip", b.cast(x, dtype), low, high)


def _where(b: Builder, node: fx.Node, mask: fx.Node, x: Any, y: Any) -> str:
    dtype = _value(node).dtype
    return b("Where", mask, _operand(b, x, dtype), _operand(b, y, dtype))


def _masked_fill(b: Builder, node: fx.Node, x: fx.Node, mask: fx.Node, value: Any) -> str:
    return _where(b, node, mask, value, x)


def _convolution(
    b: Builder,
    _node: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    settings = {"strides": stride, "pads": [*padding, *padding], "dilations": dilation, "group": groups}
    if transposed:
        return b("ConvTranspose", x, weight, bias, output_padding=output_padding, **settings)
    return b("Conv", x, weight, bias, **settings)


def _pair(value: int | Sequence[int]) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values


def _max_pool(
    b: Builder,
    _node: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[str | None]:
    shape, pads = _pair(kernel), _pair(padding)
    name = b(
        "MaxPool",
        x,
        kernel_shape=shape,
        strides=_pair(stride) if stride else shape,
        pads=[*pads, *pads],
        dilations=_pair(dilation),
        ceil_mode=int(ceil_mode),
    )
    return [name, None]


def _avg_pool(
    b: Builder,
    _node: fx.Node,
    x: fx.Node,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_padding: bool = True,
    _divisor: None = None,
) -> str:
    shape, pads = _pair(kernel), _pair(padding)
    return b(
        "AveragePool",
        x,
        kernel_shape=shape,
        strides=_pair(stride) if stride else shape,
        pads=[*pads, *pads],
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_padding),
    )


def _batch_norm(
    b: Builder,
    _node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    *settings: Any,
) -> list[str | None]:
    """With running statistics; `settings` ends in momentum and epsilon, before them perhaps whether it trains."""
    assert not any(setting is True for setting in settings), "batch norm in training mode"
    count, dtype = int(_value(x).shape[1]), _value(x).dtype
    scale = weight or b.constant([1.0] * count, dtype)
    shift = bias or b.constant([0.0] * count, dtype)
    return [b("BatchNormalization", x, scale, shift, mean, variance, epsilon=float(settings[-1])), None, None]


def _layer_norm(
    b: Builder,
    _node: fx.Node,
    x: fx.Node,
    shape: Sequence[int],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> list[str]:
    scale = weight or b.constant(torch.ones(list(shape), dtype=_value(x).dtype))
    return b.several("LayerNormalization", 3, x, scale, bias, axis=-len(shape), epsilon=float(eps))


def _attention(
    b: Builder,
    _node: fx.Node,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    _dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: fx.Node | None = None,
    scale: float | None = None,
) -> list[str | None]:
    dtype, size = _value(query).dtype, int(_value(query).shape[-1])
    scaled = b("Mul", query, b.constant(size**-0.5 if scale is None else scale, dtype))
    scores = b("MatMul", scaled, b("Transpose", key, perm=[0, 1, 3, 2]))
    if causal:
        rows, columns = int(_value(query).shape[-2]), int(_value(key).shape[-2])
        hidden = torch.full((rows, columns), float("-inf"), dtype=dtype).triu(1)
        scores = b("Add", scores, b.constant(hidden))
    if attn_mask is not None:
        scores = b("Add", scores, attn_mask)
    return [b("MatMul", b("Softmax", scores, axis=-1), value), None]


def _recurrent(b: Builder, node: fx.Node, x: fx.Node, *arguments: Any) -> list[str | None]:
    """One LSTM layer in one direction. Gates are input, forget, cell, output; in ONNX input, output, forget, cell."""
    *weights, hidden, cell, reverse, _sizes, mode = arguments[:9]
    assert mode == 2, "recurrent layers other than LSTM"
    size = int(_value(weights[0]).shape[0]) // 4

    def reordered(weight: fx.Node) -> str:
        i, f, g, o = b.several("Split", 4, weight, b.constant([size] * 4), axis=0)
        return b("Concat", i, o, f, g, axis=0)

    lead, batch = b.constant([0]), int(_value(x).shape[1])
    w, r = (b("Unsqueeze", reordered(weight), lead) for weight in weights[:2])
    bias = b("Unsqueeze", b("Concat", *(reordered(weight) for weight in weights[2:]), axis=0), lead)
    start = [b("Reshape", state, b.constant([1, batch, size])) for state in (hidden, cell)]
    direction = "reverse" if reverse else "forward"
    y, h, c = b.several("LSTM", 3, x, w, r, bias, None, *start, hidden_size=size, direction=direction)
    shapes = [[int(n) for n in part.shape] for part in node.meta["val"][:3]]
    return [*(b("Reshape", n, b.constant(s)) for n, s in zip((y, h, c), shapes, strict=True)), None]


_REDUCTIONS = ("none", "mean", "sum")


def _nll(
    b: Builder, node: fx.Node, log_p: fx.Node, target: fx.Node, weight: fx.Node | None, reduction: int, ignored: int
) -> list[str | None]:
    """The loss; the weight of the rows that count is not computed, since only a gradient takes it."""
    name = b("NegativeLogLikelihoodLoss", log_p, target, weight, reduction=_REDUCTIONS[reduction], ignore_index=ignored)
    return [name, None]


def _mse(b: Builder, _node: fx.Node, x: fx.Node, y: fx.Node, reduction: int = 1) -> str:
    difference = b("Sub", x, y)
    square = b("Mul", difference, difference)
    return square if reduction == 0 else b(("", "ReduceMean", "ReduceSum")[reduction], square, None, keepdims=0)


def _full_like(fill: float) -> Export:
    def export(b: Builder, node: fx.Node, *_: Any, **__: Any) -> str:
        value = _value(node)
        return b.constant(torch.full([int(size) for size in value.shape], fill, dtype=value.dtype))

    return export


def _full(b: Builder, node: fx.Node, _like: Any, fill: Any, **_: Any) -> str:
    value = _value(node)
    return b.constant(torch.full([int(size) for size in value.shape], fill, dtype=value.dtype))


def _arange(b: Builder, node: fx.Node, *bounds: Any, **_: Any) -> str:
    return b.constant(torch.arange(*bounds, dtype=_value(node).dtype))


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

EXPORTS: Mapping[str, Export] = {
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
    **_over("native_batch_norm.default _native_batch_norm_legit_no_training.default", _batch_norm),
    **_over("zeros_like.default zeros.default new_zeros.default", _full_like(0)),
    **_over("ones_like.default ones.default new_ones.default", _full_like(1)),
    **_over("full_like.default full.default", _full),
    **_over("arange.default arange.start arange.start_step", _arange),
    "aten._log_softmax.default": _softmax("LogSoftmax"),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._softmax.default": _softmax("Softmax"),
    "aten._to_copy.default": lambda b, node, x, **_: b.name(b.cast(x, _value(node).dtype)),
    "aten.addmm.default": _addmm,
    "aten.amax.default": _reduce("ReduceMax"),
    "aten.amin.default": _reduce("ReduceMin"),
    "aten.avg_pool2d.default": _avg_pool,
    "aten.cat.default": _cat,
    "aten.clamp.default": _clamp,
    "aten.constant_pad_nd.default": _pad,
    "aten.convolution.default": _convolution,
    "aten.elu.default": lambda b, node, x, alpha=1, *_: b("Elu", x, alpha=float(alpha)),
    "aten.embedding.default": lambda b, node, weight, index, *_: b("Gather", weight, index, axis=0),
    "aten.expand.default": _expand,
    "aten.gelu.default": lambda b, node, x, approximate="none": b("Gelu", x, approximate=approximate),
    "aten.index_select.default": lambda b, node, x, dim, index: b("Gather", x, index, axis=dim),
    "aten.leaky_relu.default": lambda b, node, x, slope=0.01: b("LeakyRelu", x, alpha=float(slope)),
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.mkldnn_rnn_layer.default": _recurrent,
    "aten.mse_loss.default": _mse,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.nll_loss_forward.default": _nll,
    "aten.permute.default": _permute,
    "aten.rsqrt.default": lambda b, node, x: b("Reciprocal", b("Sqrt", x)),
    "aten.select.int": _select,
    "aten.silu.default": lambda b, node, x: b("Mul", x, b("Sigmoid", x)),
    "aten.slice.Tensor": _slice,
    "aten.stack.default": _stack,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
}
