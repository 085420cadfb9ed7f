"""Operators of ATen that make, move and pick elements, in JAX."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from weft.graph.jax.conversion import jax_dtype, over

__all__ = ["TABLE"]


def _full(size: Sequence[int], value: float, **options: Any) -> Array:
    return jnp.full(tuple(size), value, jax_dtype(options.get("dtype")))


def _full_like(x: Array, value: float, **options: Any) -> Array:
    return jnp.full(x.shape, value, jax_dtype(options.get("dtype")) or x.dtype)


def _new_full(x: Array, size: Sequence[int], value: float, **options: Any) -> Array:
    return jnp.full(tuple(size), value, jax_dtype(options.get("dtype")) or x.dtype)


def _arange(*bounds: float, **options: Any) -> Array:
    return jnp.asarray(np.arange(*bounds), jax_dtype(options.get("dtype")))


def _expand(x: Array, size: Sequence[int], **_options: Any) -> Array:
    """-1 keeps a size; new dimensions come first."""
    new = len(size) - x.ndim
    return jnp.broadcast_to(x, tuple(x.shape[i - new] if n == -1 else n for i, n in enumerate(size)))


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    return x[_at(x.ndim, dim, slice(start, end, step))]


def _slice_backward(grad: Array, size: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    return jnp.zeros(tuple(size), grad.dtype).at[_at(len(size), dim, slice(start, end, step))].set(grad)


def _select_backward(grad: Array, size: Sequence[int], dim: int, index: int) -> Array:
    return jnp.zeros(tuple(size), grad.dtype).at[_at(len(size), dim, index)].set(grad)


def _slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    return x.at[_at(x.ndim, dim, slice(start, end, step))].set(source)


def _at(ndim: int, dim: int, what: Any) -> tuple[Any, ...]:
    place = dim % ndim
    return (*[slice(None)] * place, what)


def _split(x: Array, size: int, dim: int = 0) -> list[Array]:
    return jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim) if x.shape[dim] else [x]


def _split_with_sizes(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=dim)


def _unbind(x: Array, dim: int = 0) -> list[Array]:
    return [x[_at(x.ndim, dim, i)] for i in range(x.shape[dim])]


def _squeeze(x: Array, dims: int | Sequence[int] | None = None) -> Array:
    """A dimension that is not 1 stays."""
    if dims is None:
        return jnp.squeeze(x)
    wanted = [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(dim for dim in wanted if x.ndim and x.shape[dim] == 1))


def _pad(x: Array, pad: Sequence[int], value: float = 0) -> Array:
    """Pairs of (before, after) from the last dimension backwards; a negative one cuts."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1]
    cut = tuple(slice(max(0, -low), n - max(0, -high)) for (low, high), n in zip(widths, x.shape, strict=True))
    return jnp.pad(x[cut], [(max(0, low), max(0, high)) for low, high in widths], constant_values=value)


def _repeat(x: Array, counts: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(counts))


def _cat(parts: Sequence[Array], dim: int = 0) -> Array:
    kept = [part for part in parts if part.shape != (0,)]  # as torch has it, an empty vector goes with anything
    return jnp.concatenate(kept or list(parts), axis=dim)


def _gather(x: Array, dim: int, index: Array, **_options: Any) -> Array:
    return jnp.take_along_axis(x, index, axis=dim) if x.ndim else x


def _scatter(x: Array, dim: int, index: Array, source: Any, add: bool = False) -> Array:
    places = [jnp.broadcast_to(jnp.arange(n).reshape([-1 if i == d else 1 for i in range(x.ndim)]), index.shape)
              for d, n in enumerate(index.shape)]  # fmt: skip
    places[dim % x.ndim] = index
    value = source if not isinstance(source, Array) else source[tuple(slice(n) for n in index.shape)]
    target = x.at[tuple(places)]
    return target.add(value) if add else target.set(value)


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[_key(indices)]


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    target = x.at[_key(indices)]
    return target.add(values) if accumulate else target.set(values)


def _key(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _embedding(weight: Array, indices: Array, *_settings: Any) -> Array:
    return jnp.take(weight, indices, axis=0)


def _embedding_backward(grad: Array, indices: Array, num_rows: int, padding: int, by_frequency: bool) -> Array:
    flat, rows = indices.reshape(-1), grad.reshape(indices.size, -1)
    if padding >= 0:
        rows = jnp.where((flat == padding)[:, None], 0, rows)
    if by_frequency:
        counts = jnp.zeros(num_rows, rows.dtype).at[flat].add(1)
        rows = rows / counts[flat][:, None]
    return jnp.zeros((num_rows, rows.shape[1]), grad.dtype).at[flat].add(rows)


TABLE: Mapping[str, Callable[..., Any]] = {
    **over("aten.view.default aten._unsafe_view.default aten.reshape.default", lambda x, size: x.reshape(tuple(size))),
    **over("aten.squeeze.default aten.squeeze.dim aten.squeeze.dims", _squeeze),
    **over("aten.split_with_sizes.default aten.split_with_sizes_copy.default", _split_with_sizes),
    **over("aten.arange.default aten.arange.start aten.arange.start_step", _arange),
    **over("aten.empty.memory_format aten.zeros.default", partial(_full, value=0)),
    **over("aten.empty_like.default aten.zeros_like.default", partial(_full_like, value=0)),
    **over("aten.new_empty.default aten.new_zeros.default", partial(_new_full, value=0)),
    **over("aten.scatter.src aten.scatter.value", _scatter),
    "aten.cat.default": _cat,
    "aten.constant_pad_nd.default": _pad,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.empty_strided.default": lambda size, _stride, **options: _full(size, 0, **options),
    "aten.expand.default": _expand,
    "aten.flip.default": lambda x, dims: jnp.flip(x, tuple(dims)),
    "aten.full.default": _full,
    "aten.full_like.default": _full_like,
    "aten.gather.default": _gather,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.index_select.default": lambda x, dim, index: jnp.take(x, index, axis=dim),
    "aten.new_empty_strided.default": lambda x, size, _stride, **options: _new_full(x, size, 0, **options),
    "aten.new_full.default": _new_full,
    "aten.new_ones.default": partial(_new_full, value=1),
    "aten.ones.default": partial(_full, value=1),
    "aten.ones_like.default": partial(_full_like, value=1),
    "aten.permute.default": lambda x, dims: jnp.transpose(x, tuple(dims)),
    "aten.repeat.default": _repeat,
    "aten.scalar_tensor.default": lambda value, **options: jnp.asarray(value, jax_dtype(options.get("dtype"))),
    "aten.scatter_add.default": lambda x, dim, index, source: _scatter(x, dim, index, source, add=True),
    "aten.select.int": lambda x, dim, index: x[_at(x.ndim, dim, index)],
    "aten.select_backward.default": _select_backward,
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.split.Tensor": _split,
    "aten.stack.default": lambda parts, dim=0: jnp.stack(list(parts), axis=dim),
    "aten.t.default": lambda x: x.T,
    "aten.transpose.int": lambda x, a, b: jnp.swapaxes(x, a, b) if x.ndim else x,
    "aten.tril.default": jnp.tril,
    "aten.triu.default": jnp.triu,
    "aten.unbind.int": _unbind,
    "aten.unsqueeze.default": lambda x, dim: jnp.expand_dims(x, dim),
}
