"""Element-wise ONNX operators in torch."""

from collections.abc import Callable, Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.graph.onnx.import_operator import Attributes, ImportedOperator, plain
from weft.graph.onnx.tensor_types import torch_type

__all__ = ["TABLE"]


def _div(x: Tensor, y: Tensor) -> Tensor:
    """Integers are divided towards zero."""
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _pow(x: Tensor, y: Tensor) -> Tensor:
    """In the type of the base."""
    return torch.pow(x, y).to(x.dtype)


def _mod(attributes: Attributes, x: Tensor, y: Tensor) -> Tensor:
    return torch.fmod(x, y) if attributes.get("fmod", 0) else torch.remainder(x, y)


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, x * slope, x)


def _hard_sigmoid(attributes: Attributes, x: Tensor) -> Tensor:
    slope: float = attributes.get("alpha", 0.2)
    shift: float = attributes.get("beta", 0.5)
    return (slope * x + shift).clamp(0, 1)


def _selu(attributes: Attributes, x: Tensor) -> Tensor:
    alpha: float = attributes.get("alpha", 1.6732632)
    gamma: float = attributes.get("gamma", 1.0507010)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


def _thresholded_relu(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.where(x > attributes.get("alpha", 1.0), x, 0.0)


def _shrink(attributes: Attributes, x: Tensor) -> Tensor:
    bias, limit = attributes.get("bias", 0.0), attributes.get("lambd", 0.5)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x))).to(x.dtype)


def _clip(attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Bounds are inputs, or attributes in old versions; the upper one wins where they cross."""
    lower = attributes.get("min", None) if low is None else low
    upper = attributes.get("max", None) if high is None else high
    x = x if lower is None else torch.maximum(x, torch.as_tensor(lower, dtype=x.dtype))
    return x if upper is None else torch.minimum(x, torch.as_tensor(upper, dtype=x.dtype))


def _cast(attributes: Attributes, x: Tensor) -> Tensor:
    return x.to(torch_type(attributes["to"]))


def _mean(*inputs: Tensor) -> Tensor:
    return reduce(torch.add, inputs) / len(inputs)


def _over(function: Callable[..., Tensor]) -> ImportedOperator:
    """An operator that takes any number of inputs."""
    return plain(lambda *inputs: reduce(function, inputs))


_PLAIN: Mapping[str, Callable[..., Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Add": torch.add,
    "And": torch.logical_and,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Div": _div,
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSwish": F.hardswish,
    "Identity": torch.clone,
    "IsNaN": torch.isnan,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "Mish": F.mish,
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": _prelu,
    "Pow": _pow,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}

TABLE: Mapping[str, ImportedOperator] = {
    **{name: plain(function) for name, function in _PLAIN.items()},
    "Cast": ImportedOperator(_cast),
    "CastLike": plain(lambda x, like: x.to(like.dtype)),
    "Celu": ImportedOperator(lambda attributes, x: F.celu(x, attributes.get("alpha", 1.0))),
    "Clip": ImportedOperator(_clip),
    "Elu": ImportedOperator(lambda attributes, x: F.elu(x, attributes.get("alpha", 1.0))),
    "Gelu": ImportedOperator(lambda attributes, x: F.gelu(x, approximate=attributes.get("approximate", "none"))),
    "HardSigmoid": ImportedOperator(_hard_sigmoid),
    "LeakyRelu": ImportedOperator(lambda attributes, x: F.leaky_relu(x, attributes.get("alpha", 0.01))),
    "Max": _over(torch.maximum),
    "Mean": plain(_mean),
    "Min": _over(torch.minimum),
    "Mod": ImportedOperator(_mod),
    "Selu": ImportedOperator(_selu),
    "Shrink": ImportedOperator(_shrink),
    "Sum": _over(torch.add),
    "ThresholdedRelu": ImportedOperator(_thresholded_relu),
}
