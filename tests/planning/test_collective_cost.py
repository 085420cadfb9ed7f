"""Formulas of collectives at sizes that can be done by hand; counted schedules are compared in test_schedules.py."""

import pytest

from weft.errors import UsageError
from weft.planning.collective_cost import ALL_REDUCE_ALGORITHMS, all_reduce_cost, collective_cost, estimate


def test_ring_is_two_n_minus_one_nths() -> None:
    cost = all_reduce_cost("ring", 4, 1000)
    assert (cost.rounds, cost.rank_bytes, cost.path_reduced, cost.total_bytes) == (6, 1500, 750, 6000)


def test_halving_doubling_folds_what_is_beyond_a_power_of_two() -> None:
    assert all_reduce_cost("halving_doubling", 8, 800).rounds == 6
    folded = all_reduce_cost("halving_doubling", 9, 800)
    assert (folded.rounds, folded.path_bytes) == (8, 2 * 700 + 2 * 800)


@pytest.mark.parametrize("algorithm", ALL_REDUCE_ALGORITHMS)
def test_every_all_reduce_sends_the_same_in_total_and_nothing_alone(algorithm: str) -> None:
    assert all_reduce_cost(algorithm, 6, 600, ranks_per_host=4).total_bytes == 6000  # type: ignore[arg-type]
    assert all_reduce_cost(algorithm, 1, 600).rounds == 0  # type: ignore[arg-type]


def test_estimate_adds_the_three_terms() -> None:
    assert estimate(all_reduce_cost("tree", 2, 10), alpha=1.0, beta=0.1, gamma=0.01) == pytest.approx(2 + 2 + 0.1)


def test_a_misspelt_algorithm_is_refused_and_one_rank_sends_nothing() -> None:
    with pytest.raises(UsageError, match="did you mean 'tree'"):
        all_reduce_cost("tre", 2, 10)  # type: ignore[arg-type]
    assert collective_cost("all_gather", 1, 10).total_bytes == 0
