"""Strict JSON: exact there and back, and refused where it is not JSON."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.records.strict_json import decode_json, encode_json, parse_json

NUMBER_LIKE = st.sampled_from(["inf", "-inf", "nan", "\\inf", "\\\\nan", "\\", "Infinity", "-nan", "\\x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | NUMBER_LIKE
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)


@given(VALUES)
def test_there_and_back_through_strict_json(value: Any) -> None:
    text = json.dumps(encode_json(value), allow_nan=False)
    # Compared as text: a value that is no number does not equal itself, and 1 would equal 1.0 and True.
    assert repr(decode_json(parse_json(text))) == repr(value)


@dataclass(frozen=True)
class Point:
    x: float
    label: str


def test_what_json_lacks() -> None:
    value = {"a": math.inf, "b": "inf", "c": Point(-math.inf, "nan"), "d": (1, math.nan)}
    assert encode_json(value) == {"a": "inf", "b": "\\inf", "c": {"x": "-inf", "label": "\\nan"}, "d": [1, "nan"]}


def test_numpy_scalars_become_plain_numbers() -> None:
    encoded = encode_json([np.float32(0.5), np.float64("inf"), np.int64(3)])
    assert encoded == [0.5, "inf", 3]
    assert [type(item) for item in encoded] == [float, str, int]


@pytest.mark.parametrize("value", [{1: "x"}, {"a": {None: 1}}, {"a": object()}, b"bytes", {"set"}])
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_json(value)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}', "", "{", '{"a": 1', "1e400", "[" * 100_000])
def test_what_is_not_strict_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
