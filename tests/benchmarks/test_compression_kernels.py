"""The benchmark of kernels: every case runs, and a row says whether its bar is met."""

from collections.abc import Callable

import pytest

from benchmarks.compression_kernels import BARS, Case, cases_of, rows_of
from weft.metrics.timing import InterleavedTimings, Timing


def test_every_case_runs_and_has_its_reference() -> None:
    cases = cases_of(2000)
    for case in cases.values():
        case.call()
        assert case.reference in cases and case.num_bytes > 0
    assert set(BARS) <= set(cases)


def nothing() -> None:
    pass


@pytest.mark.parametrize(("seconds", "is_met"), [(0.02, True), (0.04, False)])
def test_a_bar_is_held_to_the_ratio_within_rounds(seconds: float, is_met: bool) -> None:
    call: Callable[[], None] = nothing
    cases = {"mul_": Case(call, 10**8), "select": Case(call, 10**8), "quantise 4 bits": Case(call, 10**7)}
    values = {"mul_": 0.01, "select": seconds, "quantise 4 bits": seconds / 3}
    timings = {
        name: Timing(name, tuple(value * (1 + 0.001 * i) for i in range(8)), 0, "count budget spent")
        for name, value in values.items()
    }
    rows = {row["case"]: row for row in rows_of(cases, InterleavedTimings(timings))}
    assert rows["select"]["times_the_reference"] == pytest.approx(seconds / 0.01)
    assert rows["select"]["meets_bar"] is is_met
    assert rows["quantise 4 bits"]["GB/s"] == pytest.approx(0.03 / seconds, rel=0.02)
    assert rows["quantise 4 bits"]["meets_bar"] is is_met and "meets_bar" not in rows["mul_"]
