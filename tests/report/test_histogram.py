"""A histogram in text: nothing is lost in its bins, and a long tail does not hide the rest."""

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.histogram import MOST_BINS, added, binned, histogram_lines


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300).filter(any), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_bins_are_few_and_hold_everything(counts: list[int], most: int) -> None:
    rows = binned(counts, most)
    assert sum(count for _, count in rows) == sum(counts)
    assert len(rows) <= most + 1


def test_a_few_numbers_are_shown_one_by_one() -> None:
    assert [line.plain for line in histogram_lines([1, 0, 3], "#")] == [
        "0  1  25.0%  ########",
        "1  0   0.0%",
        "2  3  75.0%  ########################",
    ]


def test_a_long_tail_is_one_bin() -> None:
    rows = binned([100] * 20 + [0] * 500 + [1])
    assert (len(rows), rows[0], rows[-1]) == (MOST_BINS + 1, ("0 to 1", 200), ("20 or more", 1))


def test_trainings_of_different_staleness_are_added() -> None:
    assert added([(1.0,), (1.0, 0.0, 2.0), ()]) == [2, 0, 2]
    assert added([]) == []
