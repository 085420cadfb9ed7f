"""Element-wise operators of ATen in JAX, and their gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import erf

from weft.graph.jax.conversion import over, vjp

__all__ = ["TABLE"]


def _add(x: Array, y: Array, alpha: float = 1) -> Array:
    return x + y if alpha == 1 else x + alpha * y


def _sub(x: Array, y: Array, alpha: float = 1) -> Array:
    return x - y if alpha == 1 else x - alpha * y


def _rsub(x: Array, y: Array, alpha: float = 1) -> Array:
    return _sub(y, x, alpha)


def _div_mode(x: Array, y: Array, *, rounding_mode: str | None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    quotient = jnp.true_divide(x, y)
    return jnp.trunc(quotient) if rounding_mode == "trunc" else quotient


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    """A maximum and a minimum that hand NaN on, as torch's do."""
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return 0.5 * x * (1 + erf(x * 0.5**0.5))


def _gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    return vjp(lambda value: _gelu(value, approximate=approximate), x, grad)


def _threshold_backward(grad: Array, x: Array, threshold: float) -> Array:
    return jnp.where(x <= threshold, 0, grad)


def _leaky_relu(x: Array, slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, x * slope)


def _leaky_relu_backward(grad: Array, x: Array, slope: float, _is_result: bool) -> Array:
    return jnp.where(x > 0, grad, grad * slope)


def _elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(jnp.minimum(x, 0) * input_scale))


def _elu_backward(grad: Array, alpha: float, scale: float, input_scale: float, is_result: bool, x: Array) -> Array:
    slope = x + alpha * scale if is_result else alpha * scale * jnp.exp(x * input_scale)
    return grad * jnp.where(x > 0, scale, input_scale * slope)


def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta)


def _softplus_backward(grad: Array, x: Array, beta: float, threshold: float) -> Array:
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


def _hardtanh_backward(grad: Array, x: Array, low: float, high: float) -> Array:
    return jnp.where((x <= low) | (x >= high), 0, grad)


def _addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + value * a * b


def _addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    return x + value * (a / b)


def _lerp(start: Array, end: Array, weight: Array | float) -> Array:
    return start + weight * (end - start)


def _pow(x: Any, exponent: Any) -> Array:
    is_square = isinstance(exponent, (int, float)) and exponent == 2
    return jnp.square(x) if is_square else jnp.power(x, exponent)


def _copied(x: Array, **_options: Any) -> Array:
    return x


def _comparison(name: str, function: Callable[..., Array]) -> dict[str, Callable[..., Array]]:
    return over(f"aten.{name}.Tensor aten.{name}.Scalar", function)


_UNARY: Mapping[str, Callable[..., Array]] = {
    "abs": jnp.abs,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "erf": erf,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "gelu": _gelu,
    "isnan": jnp.isnan,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "logical_not": jnp.logical_not,
    "bitwise_not": jnp.bitwise_not,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": lambda x: jnp.maximum(x, 0),
    "round": jnp.round,
    "rsqrt": lambda x: 1 / jnp.sqrt(x),
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
}

TABLE: Mapping[str, Callable[..., Any]] = {
    **{f"aten.{name}.default": function for name, function in _UNARY.items()},
    **over("aten.clone.default aten._to_copy.default aten.lift_fresh_copy.default aten.detach.default", _copied),
    **over("aten.alias.default aten.contiguous.default aten.detach_copy.default", _copied),
    **over("aten.add.Tensor aten.add.Scalar", _add),
    **over("aten.sub.Tensor aten.sub.Scalar", _sub),
    **over("aten.rsub.Scalar aten.rsub.Tensor", _rsub),
    **over("aten.mul.Tensor aten.mul.Scalar", jnp.multiply),
    **over("aten.div.Tensor aten.div.Scalar", jnp.true_divide),
    **over("aten.div.Tensor_mode aten.div.Scalar_mode", _div_mode),
    **over("aten.pow.Tensor_Scalar aten.pow.Tensor_Tensor aten.pow.Scalar", _pow),
    **over("aten.remainder.Scalar aten.remainder.Tensor", jnp.remainder),
    **over("aten.bitwise_and.Tensor aten.bitwise_and.Scalar", jnp.bitwise_and),
    **over("aten.bitwise_or.Tensor aten.bitwise_or.Scalar", jnp.bitwise_or),
    **over("aten.where.self aten.where.ScalarOther aten.where.ScalarSelf aten.where.Scalar", jnp.where),
    **over("aten.masked_fill.Scalar aten.masked_fill.Tensor", lambda x, mask, value: jnp.where(mask, value, x)),
    **over("aten.clamp.default aten.clamp.Tensor", _clamp),
    **over("aten.lerp.Scalar aten.lerp.Tensor", _lerp),
    **_comparison("eq", jnp.equal),
    **_comparison("ne", jnp.not_equal),
    **_comparison("lt", jnp.less),
    **_comparison("le", jnp.less_equal),
    **_comparison("gt", jnp.greater),
    **_comparison("ge", jnp.greater_equal),
    "aten.addcdiv.default": _addcdiv,
    "aten.addcmul.default": _addcmul,
    "aten.clamp_max.default": lambda x, high: jnp.minimum(x, high),
    "aten.clamp_min.default": lambda x, low: jnp.maximum(x, low),
    "aten.copy.default": lambda x, source, *_: jnp.broadcast_to(source, x.shape),
    "aten.elu.default": _elu,
    "aten.elu_backward.default": _elu_backward,
    "aten.gelu_backward.default": _gelu_backward,
    "aten.hardtanh.default": lambda x, low=-1, high=1: _clamp(x, low, high),
    "aten.hardtanh_backward.default": _hardtanh_backward,
    "aten.leaky_relu.default": _leaky_relu,
    "aten.leaky_relu_backward.default": _leaky_relu_backward,
    "aten.logical_and.default": jnp.logical_and,
    "aten.logical_or.default": jnp.logical_or,
    "aten.maximum.default": jnp.maximum,
    "aten.minimum.default": jnp.minimum,
    "aten.sigmoid_backward.default": lambda grad, y: grad * y * (1 - y),
    "aten.silu_backward.default": lambda grad, x: vjp(lambda value: value * jax.nn.sigmoid(value), x, grad),
    "aten.softplus.default": _softplus,
    "aten.softplus_backward.default": _softplus_backward,
    "aten.tanh_backward.default": lambda grad, y: grad * (1 - y * y),
    "aten.threshold_backward.default": _threshold_backward,
}
