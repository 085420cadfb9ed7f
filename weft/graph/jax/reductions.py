"""Reductions of ATen in JAX: sums, extremes, softmax and norms, and their gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from weft.graph.jax.conversion import jax_dtype, over

__all__ = ["TABLE"]

Dims = Sequence[int] | int | None


def _axes(dims: Dims) -> tuple[int, ...] | None:
    """No dimension at all, or an empty list, means all."""
    if dims is None or isinstance(dims, int):
        return None if dims is None else (dims,)
    return tuple(dims) or None


def _sum(x: Array, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return jnp.sum(x, _axes(dims), keepdims=keepdim, dtype=jax_dtype(dtype))


def _mean(x: Array, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    return jnp.mean(x, _axes(dims), keepdims=keepdim, dtype=jax_dtype(dtype))


def _var(x: Array, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Array:
    return jnp.var(x, _axes(dims), ddof=1 if correction is None else correction, keepdims=keepdim)  # type: ignore[arg-type]


def _var_mean(x: Array, dims: Dims = None, **options: Any) -> tuple[Array, Array]:
    return _var(x, dims, **options), _mean(x, dims, options.get("keepdim", False))


def _extreme(extreme: Callable[..., Array], place: Callable[..., Array]) -> Callable[..., Any]:
    def function(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
        return extreme(x, dim, keepdims=keepdim), place(x, dim, keepdims=keepdim)

    return function


def _vector_norm(x: Array, order: float = 2, dims: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    x, axes = x if dtype is None else x.astype(jax_dtype(dtype)), _axes(dims)
    if order == 2:
        return jnp.sqrt(jnp.sum(x * x, axes, keepdims=keepdim))
    if order == 1:
        return jnp.sum(jnp.abs(x), axes, keepdims=keepdim)
    if order == float("inf"):
        return jnp.max(jnp.abs(x), axes, keepdims=keepdim)
    return jnp.sum(jnp.abs(x) ** order, axes, keepdims=keepdim) ** (1 / order)


def _softmax(x: Array, dim: int, _to_float: bool) -> Array:
    return jax.nn.softmax(x, axis=dim)


def _log_softmax(x: Array, dim: int, _to_float: bool) -> Array:
    return jax.nn.log_softmax(x, axis=dim)


def _softmax_backward(grad: Array, y: Array, dim: int, _dtype: Any) -> Array:
    return y * (grad - jnp.sum(grad * y, dim, keepdims=True))


def _log_softmax_backward(grad: Array, y: Array, dim: int, _dtype: Any) -> Array:
    return grad - jnp.exp(y) * jnp.sum(grad, dim, keepdims=True)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """The result, and the mean and 1/deviation that backward takes."""
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean = jnp.mean(x, axes, keepdims=True)
    scale = 1 / jnp.sqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + eps)
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, scale


def _layer_norm_backward(
    grad: Array,
    x: Array,
    shape: Sequence[int],
    mean: Array,
    scale: Array,
    weight: Array | None,
    _bias: Array | None,
    wanted: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    own = tuple(range(x.ndim - len(shape), x.ndim))
    rows = tuple(range(x.ndim - len(shape)))
    normal = (x - mean) * scale
    inner = grad if weight is None else grad * weight
    along = normal * jnp.mean(inner * normal, own, keepdims=True)
    slope = scale * (inner - jnp.mean(inner, own, keepdims=True) - along)
    return (
        slope if wanted[0] else None,
        jnp.sum(grad * normal, rows) if wanted[1] else None,
        jnp.sum(grad, rows) if wanted[2] else None,
    )


def _batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array | None,
    variance: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, ...]:
    """The result, what backward takes (mean, 1/deviation), and the new running statistics."""
    axes = (0, *range(2, x.ndim))
    if not training:
        assert mean is not None and variance is not None
        empty = jnp.zeros(0, x.dtype)
        return _scaled(x, mean, 1 / jnp.sqrt(variance + eps), weight, bias), empty, empty, mean, variance
    own = jnp.mean(x, axes)
    spread = jnp.mean((x - _channels(own, x)) ** 2, axes)
    scale, count = 1 / jnp.sqrt(spread + eps), x.size // x.shape[1]
    result = _scaled(x, own, scale, weight, bias), own, scale
    if mean is None or variance is None:
        return result
    unbiased = spread * (count / max(count - 1, 1))
    return *result, mean + momentum * (own - mean), variance + momentum * (unbiased - variance)


def _batch_norm_backward(
    grad: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array | None,
    running_variance: Array | None,
    mean: Array | None,
    scale: Array | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    if not training:
        assert running_mean is not None and running_variance is not None
        mean, scale = running_mean, 1 / jnp.sqrt(running_variance + eps)
    assert mean is not None and scale is not None
    axes = (0, *range(2, x.ndim))
    normal = (x - _channels(mean, x)) * _channels(scale, x)
    by_bias, by_weight = jnp.sum(grad, axes), jnp.sum(grad * normal, axes)
    slope = grad
    if training:
        count = x.size // x.shape[1]
        slope = grad - (_channels(by_bias, x) + normal * _channels(by_weight, x)) / count
    slope = slope * _channels(scale if weight is None else scale * weight, x)
    return slope if wanted[0] else None, by_weight if wanted[1] else None, by_bias if wanted[2] else None


def _scaled(x: Array, mean: Array, scale: Array, weight: Array | None, bias: Array | None) -> Array:
    y = (x - _channels(mean, x)) * _channels(scale if weight is None else scale * weight, x)
    return y if bias is None else y + _channels(bias, x)


def _channels(vector: Array, like: Array) -> Array:
    """A value for each channel, dimension 1."""
    return vector.reshape([1, -1, *[1] * (like.ndim - 2)])


def _without_statistics(
    x: Array, weight: Array | None, bias: Array | None, training: bool, momentum: float, eps: float
) -> tuple[Array, ...]:
    return _batch_norm(x, weight, bias, None, None, training, momentum, eps)


def _first_three(*arguments: Any) -> tuple[Array, ...]:
    return _batch_norm(*arguments)[:3]


TABLE: Mapping[str, Callable[..., Any]] = {
    **over("aten.sum.default aten.sum.dim_IntList", _sum),
    **over("aten.mean.default aten.mean.dim", _mean),
    **over(
        "aten.any.default aten.any.dim aten.any.dims", lambda x, dim=None, keep=False: jnp.any(x, dim, keepdims=keep)
    ),
    **over(
        "aten.all.default aten.all.dim aten.all.dims", lambda x, dim=None, keep=False: jnp.all(x, dim, keepdims=keep)
    ),
    "aten._log_softmax.default": _log_softmax,
    "aten._log_softmax_backward_data.default": _log_softmax_backward,
    "aten._native_batch_norm_legit.no_stats": _without_statistics,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": lambda x, w, b, mean, variance, momentum, eps: _first_three(
        x, w, b, mean, variance, False, momentum, eps
    ),
    "aten._softmax.default": _softmax,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten.amax.default": lambda x, dims=(), keep=False: jnp.max(x, _axes(dims), keepdims=keep),
    "aten.amin.default": lambda x, dims=(), keep=False: jnp.min(x, _axes(dims), keepdims=keep),
    "aten.argmax.default": lambda x, dim=None, keep=False: jnp.argmax(x, dim, keepdims=keep),
    "aten.argmin.default": lambda x, dim=None, keep=False: jnp.argmin(x, dim, keepdims=keep),
    "aten.cumsum.default": lambda x, dim, *, dtype=None: jnp.cumsum(x, dim, dtype=jax_dtype(dtype)),
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.logsumexp.default": lambda x, dims, keep=False: jax.nn.logsumexp(x, _axes(dims), keepdims=keep),
    "aten.max.default": jnp.max,
    "aten.max.dim": _extreme(jnp.max, jnp.argmax),
    "aten.min.default": jnp.min,
    "aten.min.dim": _extreme(jnp.min, jnp.argmin),
    "aten.native_batch_norm.default": _first_three,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.prod.default": jnp.prod,
    "aten.var.correction": _var,
    "aten.var_mean.correction": _var_mean,
}
