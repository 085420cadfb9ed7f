"""What an operator is called with, written as Python."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from weft.graph.sizes import Size

__all__ = ["literal"]


def literal(value: Any, name: Callable[[fx.Node], str] = str) -> str:
    """The source text of a node, a number, a named size, a torch constant, or a nested tuple or list of them.

    Args:
        name: what a node is called.

    >>> literal([1, float("inf"), torch.float32])
    '[1, float("inf"), torch.float32]'
    """
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (tuple, list)):
        inside = ", ".join(literal(item, name) for item in value)
        return f"[{inside}]"  # operators take lists and tuples alike
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (Size, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    raise AssertionError(f"no literal: {value!r}")
