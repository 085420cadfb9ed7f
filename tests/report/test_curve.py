"""A curve in one line keeps its shape, its length and its accidents."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.curve import BLOCKS, shrink, sparkline

numbers = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200)


@given(numbers, st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_one_mark_a_value_up_to_the_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    assert set(line) <= set(BLOCKS + "!")


def test_rising_values_rise() -> None:
    assert sparkline([float(i) for i in range(8)]) == BLOCKS


def test_ascii_where_nothing_else_can_be_shown() -> None:
    assert sparkline([3.0, 2.0, 1.0], unicode=False).isascii()


def test_flat_curve_is_low() -> None:
    assert sparkline([5.0, 5.0, 5.0]) == BLOCKS[0] * 3


def test_accident_is_visible_though_its_neighbours_are_averaged() -> None:
    values = [1.0] * 50 + [math.nan] + [2.0] * 49
    assert sparkline(values, width=10) == "▁▁▁▁▁!████"


def test_values_near_the_largest_float_do_not_overflow() -> None:
    assert sparkline([-1.7e308, 0.0, 1.7e308]) == "▁▅█"
    assert shrink([1.7e308] * 4, 2) == pytest.approx([1.7e308, 1.7e308])


def test_shrinking_takes_means_of_even_shares() -> None:
    assert shrink([1.0, 3.0, 5.0, 7.0, 9.0], 2) == [2.0, 7.0]
