"""Convolutions, pooling, norms, attention, recurrent layers and losses of ATen as ONNX nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from weft.graph.onnx.builder import Builder, Export, value_of

__all__ = ["LAYERS"]


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


def _window(kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> dict[str, Any]:
    shape, pads = _pair(kernel), _pair(padding)
    strides = _pair(stride) if stride else shape
    return {"kernel_shape": shape, "strides": strides, "pads": [*pads, *pads], "ceil_mode": int(ceil_mode)}


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
    settings = _window(kernel, stride, padding, ceil_mode)
    return [b("MaxPool", x, dilations=_pair(dilation), **settings), None]


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
    settings = _window(kernel, stride, padding, ceil_mode)
    return b("AveragePool", x, count_include_pad=int(count_padding), **settings)


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
    count, dtype = int(value_of(x).shape[1]), value_of(x).dtype
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
    scale = weight or b.constant(torch.ones(list(shape), dtype=value_of(x).dtype))
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
    dtype, size = value_of(query).dtype, int(value_of(query).shape[-1])
    scaled = b("Mul", query, b.constant(size**-0.5 if scale is None else scale, dtype))
    scores = b("MatMul", scaled, b("Transpose", key, perm=[0, 1, 3, 2]))
    if causal:
        rows, columns = int(value_of(query).shape[-2]), int(value_of(key).shape[-2])
        hidden = torch.full((rows, columns), float("-inf"), dtype=dtype).triu(1)
        scores = b("Add", scores, b.constant(hidden))
    if attn_mask is not None:
        scores = b("Add", scores, attn_mask)
    return [b("MatMul", b("Softmax", scores, axis=-1), value), None]


def _recurrent(b: Builder, node: fx.Node, x: fx.Node, *arguments: Any) -> list[str | None]:
    """One LSTM layer in one direction. Gates are input, forget, cell, output; in ONNX input, output, forget, cell."""
    *weights, hidden, cell, reverse, _sizes, mode = arguments[:9]
    assert mode == 2, "recurrent layers other than LSTM"
    size = int(value_of(weights[0]).shape[0]) // 4

    def reordered(weight: fx.Node) -> str:
        i, f, g, o = b.several("Split", 4, weight, b.constant([size] * 4), axis=0)
        return b("Concat", i, o, f, g, axis=0)

    lead, batch = b.constant([0]), int(value_of(x).shape[1])
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


LAYERS: Mapping[str, Export] = {
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.convolution.default": _convolution,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.mkldnn_rnn_layer.default": _recurrent,
    "aten.mse_loss.default": _mse,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.nll_loss_forward.default": _nll,
}
