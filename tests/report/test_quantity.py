"""Numbers are short, aligned within a row, and not far from what was measured."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.quantity import format_duration, format_plain, scale_of


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.97777, "", "0.9778 "),
        (1.0, "", "1 "),
        (2.3456, "s", "2.346 s"),
        (0.0023456, "s", "2.346 ms"),
        (2.3e-6, "s", "2.300 µs"),
        (3725.0, "s", "3,725 s"),
        (412_900_000.0, "B", "412.9 MB"),
        (3.1e9, "FLOP/s", "3.100 GFLOP/s"),
        (12345.6, "samples/s", "12,346 samples/s"),
        (8.0, "epochs", "8 epochs"),
        (8.5, "epochs", "8.500 epochs"),
        (0.0, "s", "0 s"),
        (1.5e-7, "", "1.500e-07 "),
        (2.5e12, "", "2.500e+12 "),
        (-0.25, "nat", "-0.2500 nat"),
    ],
)
def test_number_with_its_unit(value: float, unit: str, text: str) -> None:
    scale = scale_of([value], unit)
    assert f"{scale.format(value)} {scale.unit}" == text


def test_numbers_of_one_row_share_the_scale_of_the_first() -> None:
    scale = scale_of([0.95, 0.0011, 1.2], "s")
    assert [scale.format(v) for v in (0.95, 0.0011, 1.2)] == ["950.0", "1.1", "1,200.0"]
    assert scale.unit == "ms"


def test_infinity_first_leaves_the_scale_to_the_next_value() -> None:
    scale = scale_of([math.inf, 0.0123], "s")
    assert (scale.format(0.0123), scale.unit) == ("12.30", "ms")


@pytest.mark.parametrize("unit", ["", "s", "B", "FLOP/s", "samples/s", "J"])
@given(value=st.floats(1e-12, 1e18))
@settings(max_examples=60, deadline=None)
def test_text_is_within_four_significant_digits_of_the_value(unit: str, value: float) -> None:
    scale = scale_of([value], unit)
    shown = float(scale.format(value).replace(",", "")) * 10.0**scale.power
    assert shown == pytest.approx(value, rel=5.1e-4)
    assert len(scale.format(value)) <= 15


@given(st.floats(allow_nan=True, allow_infinity=True))
@settings(max_examples=100, deadline=None)
def test_any_float_has_a_text(value: float) -> None:
    assert format_plain(value)
    if not value < 0:
        assert format_duration(value)


def test_duration() -> None:
    assert [format_duration(s) for s in (0, 59.6, 61, 3600, math.nan)] == ["0:00", "1:00", "1:01", "1:00:00", "-"]
