"""Tensors of torch and arrays of JAX: types, one memory for both where it can be; and what the tables share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils.dlpack
from jax import Array
from torch import Tensor

__all__ = ["jax_dtype", "over", "to_jax", "to_torch", "vjp"]

_TYPES = {
    torch.float64: np.dtype("float64"),
    torch.float32: np.dtype("float32"),
    torch.float16: np.dtype("float16"),
    torch.bfloat16: jnp.dtype("bfloat16"),
    torch.int64: np.dtype("int64"),
    torch.int32: np.dtype("int32"),
    torch.int16: np.dtype("int16"),
    torch.int8: np.dtype("int8"),
    torch.uint8: np.dtype("uint8"),
    torch.bool: np.dtype("bool"),
}


def jax_dtype(dtype: torch.dtype | None) -> Any:
    """The type of the same name; None for None."""
    return None if dtype is None else _TYPES[dtype]


def over(names: str, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Rows of a table: one function for several operators."""
    return dict.fromkeys(names.split(), function)


def vjp(function: Callable[[Array], Array], x: Array, grad: Array) -> Array:
    """The gradient by x, as JAX derives it."""
    _, pull_back = jax.vjp(function, x)
    (found,) = pull_back(grad)
    return found  # type: ignore[no-any-return]


def to_jax(tensor: Tensor) -> Array:
    """An array on the tensor's own memory, where that is without gaps; XLA never writes to it."""
    array: Array = jax.dlpack.from_dlpack(tensor.detach().contiguous())
    return array


def to_torch(array: Array) -> Tensor:
    """A tensor on the array's own memory, which then is the tensor's to write to."""
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor
