"""The benchmark of experts: its formula, and its row."""

import pytest

from benchmarks.placement.experts import NUM_EXPERTS, NUM_LAYERS, NUM_RANKS, predict, row_of


def test_the_formula_counts_rounds_and_the_bytes_that_leave_a_rank() -> None:
    num_bytes = NUM_LAYERS * (4 * 1000.0 + 8 * NUM_EXPERTS)
    assert predict(1.0, 0.0, num_bytes) == NUM_LAYERS * 5 * (NUM_RANKS - 1)
    assert predict(0.0, 1.0, num_bytes) == pytest.approx((NUM_RANKS - 1) / NUM_RANKS * num_bytes)


def test_the_row_has_shares_of_the_slowest_rank() -> None:
    found = {"step": 1.0, "in_all_to_all": 0.2, "messages": 0.1, "alpha": 1e-5, "beta": 1e-9, "bytes": 4e6}
    row = row_of([[found] * 6, [{**found, "step": 2.0, "in_all_to_all": 0.4, "messages": 0.2}] * 6])
    assert (row["step_ms"], row["in_all_to_all_share"], row["messages_share"]) == (2000.0, 0.15, 0.1)
