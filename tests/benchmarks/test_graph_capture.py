"""The harness of the capture benchmark: that both ways capture the same step, and what it computes from times."""

import pytest
from torch import nn

from benchmarks.graph_capture import Subject, convolutions, image, measure, row_of


def test_both_ways_have_their_turns() -> None:
    num_operators, seconds = measure(Subject(lambda: convolutions(2), nn.functional.mse_loss, image, 1))
    assert num_operators == 7 and {way: len(values) for way, values in seconds.items()} == {"weft": 1, "make_fx": 1}


def test_the_ratio_is_taken_run_by_run() -> None:
    own = [1.0, 2.0, 1.0, 4.0, 1.0, 2.0]
    row = row_of("chain", 1000, {"weft": own, "make_fx": [3 * value for value in own]})
    assert (row["make_fx / weft"], row["interval_of_ratio"]) == (3.0, [3.0, 3.0])
    assert (row["weft, s"], row["ms per operator"]) == (1.5, 1.5)


def test_without_a_peer_there_is_no_ratio() -> None:
    row = row_of("long chain", 10, {"weft": [2.0]})
    assert row["make_fx / weft"] is None and row["interval_of_weft"] is None
    assert row["ms per operator"] == pytest.approx(200)
