"""Messages of ranks at their own pace: one to be sent, and headers that are checked before they are believed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from torch import Tensor

__all__ = ["MalformedError", "Outgoing", "read_header", "read_int", "read_ints"]

Header = TypeVar("Header")


class MalformedError(ValueError):
    """A message that does not say what it must."""


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A message that is to be sent."""

    to: int
    tag: str
    header: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()


def read_header(kind: type[Header], header: Mapping[str, Any]) -> Header:
    """A dataclass from the fields of a header, each of the type that it has there; numbers are finite, and from 0 up.

    >>> @dataclass
    ... class Push:
    ...     step: int
    ...     pieces: tuple[tuple[int, float], ...]
    >>> read_header(Push, {"step": 3, "pieces": [[0, 0.5]]})
    Push(step=3, pieces=((0, 0.5),))
    """
    types = fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: _read(field.type, header.get(field.name), field.name) for field in types})


def _read(kind: Any, value: Any, key: str) -> Any:
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _read(next(k for k in arguments if k is not NoneType), value, key)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise MalformedError(key)
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise MalformedError(key)
        return tuple(_read(one, item, key) for one, item in zip(kinds, value, strict=True))
    is_number = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
    if not (is_number if kind is float else type(value) is kind and (kind is not int or is_number)):
        raise MalformedError(key)
    return kind(value)


def read_int(header: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 up."""
    return int(_read(int, header.get(key), key))


def read_ints(header: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Whole numbers from 0 up."""
    return tuple(_read(tuple[int, ...], header.get(key), key))
