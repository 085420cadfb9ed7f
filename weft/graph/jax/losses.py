"""Losses of ATen in JAX, and their gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

__all__ = ["TABLE"]

NONE, MEAN, SUM = 0, 1, 2  # how a loss is reduced


def _nll(log_p: Array, target: Array, weight: Array | None, reduction: int, ignored: int) -> tuple[Array, Array]:
    """The loss, and the weight of all rows that count. Rows are classes last, for one row a vector."""
    value, share = _rows(log_p, target, weight, ignored)
    if reduction == NONE:
        return -value * share, jnp.zeros((), log_p.dtype)
    total = jnp.sum(share)
    loss = -jnp.sum(value * share)
    return (loss / total if reduction == MEAN else loss), total


def _nll_backward(
    grad: Array, log_p: Array, target: Array, weight: Array | None, reduction: int, ignored: int, total: Array
) -> Array:
    _, share = _rows(log_p, target, weight, ignored)
    slope = -share * grad / total if reduction == MEAN else -share * grad
    chosen = jnp.arange(log_p.shape[-1]) == jnp.where(target == ignored, 0, target)[..., None]
    return jnp.where(chosen, slope[..., None], 0)


def _rows(log_p: Array, target: Array, weight: Array | None, ignored: int) -> tuple[Array, Array]:
    """Each row's value at its target, and what the row weighs: nothing where it is ignored."""
    counts = target != ignored
    place = jnp.where(counts, target, 0)
    value = jnp.take_along_axis(log_p, place[..., None], axis=-1)[..., 0]
    share = jnp.ones(place.shape, log_p.dtype) if weight is None else weight[place]
    return jnp.where(counts, value, 0), jnp.where(counts, share, 0)


def _reduced(values: Array, reduction: int) -> Array:
    return values if reduction == NONE else jnp.mean(values) if reduction == MEAN else jnp.sum(values)


def _share(x: Array, reduction: int) -> float:
    """The factor of one element's part in the loss."""
    return 1 / x.size if reduction == MEAN else 1.0


def _mse(x: Array, y: Array, reduction: int = MEAN) -> Array:
    return _reduced((x - y) ** 2, reduction)


def _mse_backward(grad: Array, x: Array, y: Array, reduction: int) -> Array:
    return 2 * _share(x, reduction) * (x - y) * grad


def _smooth_l1(x: Array, y: Array, reduction: int = MEAN, beta: float = 1.0) -> Array:
    size = jnp.abs(x - y)
    return _reduced(jnp.where(size < beta, 0.5 * size * size / max(beta, 1e-30), size - 0.5 * beta), reduction)


def _smooth_l1_backward(grad: Array, x: Array, y: Array, reduction: int, beta: float) -> Array:
    slope = jnp.where(jnp.abs(x - y) < beta, (x - y) / max(beta, 1e-30), jnp.sign(x - y))
    return _share(x, reduction) * slope * grad


TABLE: Mapping[str, Callable[..., Any]] = {
    "aten.mse_loss.default": _mse,
    "aten.mse_loss_backward.default": _mse_backward,
    "aten.nll_loss_backward.default": _nll_backward,
    "aten.nll_loss_forward.default": _nll,
    "aten.smooth_l1_loss.default": _smooth_l1,
    "aten.smooth_l1_loss_backward.default": _smooth_l1_backward,
}
