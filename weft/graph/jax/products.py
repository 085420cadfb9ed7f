"""Matrix products, convolutions and pooling of ATen in JAX, and their gradients.

A gradient that is a linear map of `grad` is the transpose that JAX derives of the forward function (`jax.vjp`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from weft.graph.jax.conversion import vjp

__all__ = ["TABLE"]


def _addmm(c: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    product = a @ b if alpha == 1 else alpha * (a @ b)
    return product if beta == 0 else product + (c if beta == 1 else beta * c)


def _pair(value: Sequence[int] | int, ndim: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * ndim if len(values) == 1 else values


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    ndim = x.ndim - 2
    stride, padding, dilation, extra = (_pair(v, ndim) for v in (stride, padding, dilation, output_padding))
    pads, dilate = [(p, p) for p in padding], (1,) * ndim
    if transposed:  # the gradient of a convolution: the input is spread out, the kernel turned round
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        pads = [(s - p, s - p + e) for s, p, e in zip(spans, padding, extra, strict=True)]
        weight, dilate, stride = _turned(weight, groups), stride, (1,) * ndim
    y = lax.conv_general_dilated(
        x, weight, stride, pads, dilate, dilation, feature_group_count=groups, precision=lax.Precision.HIGHEST
    )
    return y if bias is None else y + bias.reshape([1, -1, *[1] * ndim])


def _turned(weight: Array, groups: int) -> Array:
    """[in, out / groups, ...] -> [out, in / groups, ...], the kernel turned round."""
    inputs, outputs, *kernel = weight.shape
    parts = jnp.swapaxes(weight.reshape(groups, inputs // groups, outputs, *kernel), 1, 2)
    return jnp.flip(parts.reshape(groups * outputs, inputs // groups, *kernel), tuple(range(2, weight.ndim)))


def _convolution_backward(
    grad: Array, x: Array, weight: Array, _bias_sizes: Any, *settings: Any
) -> tuple[Array | None, Array | None, Array | None]:
    *settings_of_forward, wanted = settings
    _, pull_back = jax.vjp(lambda a, b: _convolution(a, b, None, *settings_of_forward), x, weight)
    by_x, by_weight = pull_back(grad)
    by_bias = jnp.sum(grad, (0, *range(2, grad.ndim)))
    return by_x if wanted[0] else None, by_weight if wanted[1] else None, by_bias if wanted[2] else None


def _max_pool(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    """The largest of each window and its place in the flat plane; the first of equal ones, as in torch."""
    windows, places = _windows(x, kernel, stride or kernel, padding, dilation, ceil_mode, -jnp.inf)
    best = jnp.argmax(windows, axis=0)
    index = jnp.take_along_axis(jnp.broadcast_to(places, windows.shape), best[None], axis=0)[0]
    return jnp.take_along_axis(windows, best[None], axis=0)[0], index


def _max_pool_backward(grad: Array, x: Array, *settings: Any) -> Array:
    index = settings[-1]
    lead, plane = x.shape[:-2], x.shape[-2] * x.shape[-1]
    rows = jnp.arange(x.size // plane)[:, None]
    flat = jnp.zeros((x.size // plane, plane), grad.dtype)
    return (
        flat.at[rows, index.reshape(rows.shape[0], -1)]
        .add(grad.reshape(rows.shape[0], -1))
        .reshape(*lead, *x.shape[-2:])
    )


def _windows(
    x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, fill: float
) -> tuple[Array, Array]:
    """[kernel cells, ..., rows, columns]: each window's elements, and their places in the plane that x is."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = (_pair(v, 2) for v in (kernel, stride, padding, dilation))
    height, width = x.shape[-2:]
    rows = _num_windows(height, kh, sh, ph, dh, ceil_mode)
    columns = _num_windows(width, kw, sw, pw, dw, ceil_mode)
    below = max(0, (rows - 1) * sh + (kh - 1) * dh + 1 - height - ph)
    right = max(0, (columns - 1) * sw + (kw - 1) * dw + 1 - width - pw)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(ph, below), (pw, right)], constant_values=fill)
    values, places = [], []
    for i in range(kh):
        for j in range(kw):
            top, left = i * dh, j * dw
            values.append(padded[..., top : top + (rows - 1) * sh + 1 : sh, left : left + (columns - 1) * sw + 1 : sw])
            row, column = jnp.arange(rows) * sh + top - ph, jnp.arange(columns) * sw + left - pw
            places.append(row[:, None] * width + column[None])
    grid = jnp.stack(places)
    return jnp.stack(values), grid.reshape(grid.shape[0], *[1] * (x.ndim - 2), *grid.shape[1:])


def _num_windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _avg_pool(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_padding: bool = True,
    divisor: int | None = None,
) -> Array:
    settings = kernel, stride or kernel, padding, 1, ceil_mode, 0.0
    total = jnp.sum(_windows(x, *settings)[0], axis=0)
    if divisor is not None:
        return total / divisor
    ones = jnp.ones(x.shape[-2:], x.dtype)
    if count_padding:  # cells of the padding count, those beyond it, which ceil_mode brings, do not
        ph, pw = _pair(padding, 2)
        ones = jnp.pad(ones, [(ph, ph), (pw, pw)], constant_values=1)
        settings = kernel, stride or kernel, 0, 1, ceil_mode, 0.0
    counts = jnp.sum(_windows(ones, *settings)[0], axis=0)
    return total / counts[: total.shape[-2], : total.shape[-1]]


def _avg_pool_backward(grad: Array, x: Array, *settings: Any) -> Array:
    return vjp(lambda value: _avg_pool(value, *settings), x, grad)


def _adaptive_avg_pool(x: Array, size: Sequence[int]) -> Array:
    """Cell i of n covers the pixels from floor(i * m / n) to ceil((i + 1) * m / n)."""
    for dim, count in zip((-2, -1), size, strict=True):
        pixels = x.shape[dim]
        cells = [(i * pixels // count, -(-(i + 1) * pixels // count)) for i in range(count)]
        x = jnp.stack([jnp.mean(lax.slice_in_dim(x, a, b, axis=x.ndim + dim), dim) for a, b in cells], axis=dim)
    return x


def _adaptive_avg_pool_backward(grad: Array, x: Array) -> Array:
    return vjp(lambda value: _adaptive_avg_pool(value, grad.shape[-2:]), x, grad)


TABLE: Mapping[str, Callable[..., Any]] = {
    "aten._adaptive_avg_pool2d.default": _adaptive_avg_pool,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_avg_pool_backward,
    "aten.addmm.default": _addmm,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.avg_pool2d_backward.default": _avg_pool_backward,
    "aten.baddbmm.default": _addmm,
    "aten.bmm.default": jnp.matmul,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.dot.default": jnp.dot,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    "aten.mm.default": jnp.matmul,
    "aten.mv.default": jnp.matmul,
}
