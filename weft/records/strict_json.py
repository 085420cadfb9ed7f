"""JSON that any program can read: what Python holds and JSON lacks is written as text, and read back exactly.

inf, -inf, nan      "inf", "-inf", "nan"
the text "inf"      "\\inf" (one more backslash in front of a text that would be taken for a number)
tuples              lists
"""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any, NoReturn

__all__ = ["decode_json", "encode_json", "parse_json"]

NOT_FINITE = {"inf", "-inf", "nan"}
LIKE_A_NUMBER = re.compile(r"\\*(-?inf|nan)")


def encode_json(value: Any) -> Any:
    """The value in JSON's own types. Data classes become objects, NumPy scalars become numbers.

    >>> encode_json({"best": float("inf"), "norm": "inf", "hidden": (64, 32)})
    {'best': 'inf', 'norm': '\\\\inf', 'hidden': [64, 32]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return "\\" + value if LIKE_A_NUMBER.fullmatch(value) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {_key(key): encode_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_json(item) for item in value]
    if is_dataclass(value):
        return {field.name: encode_json(getattr(value, field.name)) for field in fields(value)}
    raise TypeError(f"value cannot be written as JSON ({value!r}: {type(value).__name__})")


def decode_json(value: Any) -> Any:
    """The inverse of `encode_json`, apart from types that JSON does not tell apart.

    >>> decode_json({"best": "inf", "norm": "\\\\inf"})
    {'best': inf, 'norm': 'inf'}
    """
    if isinstance(value, str):
        if value in NOT_FINITE:
            return float(value)
        return value[1:] if LIKE_A_NUMBER.fullmatch(value) else value
    if isinstance(value, dict):
        return {key: decode_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    return value


def parse_json(text: str) -> Any:
    """The value of a text that must be strict JSON; any fault is a ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"key is not a text ({key!r}: {type(key).__name__})")
    return key


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
