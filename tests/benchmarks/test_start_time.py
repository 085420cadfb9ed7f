"""The benchmark of starting: its row, and the first step that it finds in a run's log."""

import os
from pathlib import Path

import pytest

from benchmarks.start_time import CASES, _time_first_step, row_of


def test_the_bar_is_held_to_the_upper_bound_of_the_difference() -> None:
    torch = [1.0 + 0.01 * i for i in range(6)]
    row = row_of("two ranks", {"torch": torch, "first_step": [t + 1.0 for t in torch]})
    assert (row["seconds_more"], row["interval_of_seconds_more"]) == (1.0, [1.0, 1.0])
    assert row["is_below_bar"]
    late = [t + 1.0 for t in torch[:-1]] + [torch[-1] + 1.6]
    assert not row_of("two ranks", {"torch": torch, "first_step": late})["is_below_bar"]


@pytest.mark.slow
def test_the_first_step_is_found(tmp_path: Path) -> None:
    assert _time_first_step(CASES["two ranks"], tmp_path / "run", os.environ) > 0
