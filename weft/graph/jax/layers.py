"""Attention and recurrent layers of ATen in JAX, and their gradients, which are the transposes that JAX derives."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

__all__ = ["TABLE"]

LSTM = 2  # the mode of mkldnn_rnn_layer


def _attention(
    query: Array,
    key: Array,
    value: Array,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """The result, and the logarithm of each query's sum of exponentials."""
    assert dropout == 0.0  # ATen's kernel for the CPU has none either
    scores = query @ jnp.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if attn_mask is not None:
        scores = jnp.where(attn_mask, scores, -jnp.inf) if attn_mask.dtype == bool else scores + attn_mask
    total = jax.nn.logsumexp(scores, axis=-1)
    return jnp.exp(scores - total[..., None]) @ value, total


def _attention_backward(
    grad: Array,
    query: Array,
    key: Array,
    value: Array,
    _out: Array,
    _total: Array,
    dropout: float,
    causal: bool,
    **mask: Any,
) -> tuple[Array, Array, Array]:
    def forward(q: Array, k: Array, v: Array) -> Array:
        return _attention(q, k, v, dropout, causal, **mask)[0]

    _, pull_back = jax.vjp(forward, query, key, value)
    by_query, by_key, by_value = pull_back(grad)
    return by_query, by_key, by_value


def _lstm(reverse: bool, *inputs: Array) -> tuple[Array, Array, Array]:
    """One layer in one direction over [time, batch, features]; gates in the order input, forget, cell, output."""
    x, w_input, w_hidden, b_input, b_hidden, hidden, cell = inputs

    def step(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(row + h @ w_hidden.T, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    rows = x @ w_input.T + (b_input + b_hidden)
    (h, c), y = lax.scan(step, (hidden.reshape(x.shape[1], -1), cell.reshape(x.shape[1], -1)), rows, reverse=reverse)
    return y, h.reshape(hidden.shape), c.reshape(cell.shape)


def _rnn_layer(*arguments: Any) -> tuple[Array, Array, Array, Array]:
    """mkldnn's: inputs, reverse, batch sizes, mode and more. What it keeps for backward is computed again there."""
    inputs, (reverse, _sizes, mode) = arguments[:7], arguments[7:10]
    _check_mode(mode)
    return *_lstm(reverse, *inputs), jnp.zeros(0, jnp.uint8)


def _rnn_layer_backward(*arguments: Any) -> tuple[Array, ...]:
    """mkldnn's: inputs, the three results, their gradients, reverse, mode and more."""
    inputs, grads, (reverse, mode) = arguments[:7], arguments[10:13], arguments[13:15]
    _check_mode(mode)
    outputs, pull_back = jax.vjp(lambda *values: _lstm(reverse, *values), *inputs)
    given = [jnp.zeros_like(o) if g is None else g.reshape(o.shape) for o, g in zip(outputs, grads, strict=True)]
    return tuple(pull_back(tuple(given)))


def _check_mode(mode: int) -> None:
    if mode != LSTM:
        raise NotImplementedError(f"recurrent layers other than LSTM (mode: {mode})")


TABLE: Mapping[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.mkldnn_rnn_layer.default": _rnn_layer,
    "aten.mkldnn_rnn_layer_backward.default": _rnn_layer_backward,
}
