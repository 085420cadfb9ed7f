"""Messages of ranks at their own pace: one to be sent, and headers that are checked before they are believed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["MalformedError", "Outgoing", "read_float", "read_int", "read_ints"]


class MalformedError(ValueError):
    """A message that does not say what it must."""


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message that is to be sent."""

    to: int
    tag: str
    header: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


def read_int(header: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 up."""
    value = header.get(key)
    if type(value) is not int or value < 0:
        raise MalformedError(key)
    return value


def read_ints(header: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Whole numbers from 0 up."""
    values = header.get(key)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise MalformedError(key)
    return tuple(values)


def read_float(header: Mapping[str, Any], key: str, *, most: float = math.inf) -> float:
    """A finite number from 0 to `most`."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MalformedError(key)
    if not 0 <= value <= most:
        raise MalformedError(key)
    return float(value)
