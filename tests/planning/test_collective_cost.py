"""Formulas of collectives for sizes where anyone can check them by hand."""

import pytest

from weft.errors import UsageError
from weft.planning.collective_cost import ALL_REDUCE_ALGORITHMS, Algorithm, all_reduce_cost, collective_cost
from weft.planning.cost import CommunicationCost, Cost, estimate
from weft.specs.roles import assign_roles


def test_ring_of_four() -> None:
    cost = all_reduce_cost(Algorithm("ring"), 4, 1000)
    assert cost.addresses == (Cost(1500, 6, 1500, 750),) * 4 and cost.total_bytes == 6000


def test_a_tree_of_six_sends_from_its_forks() -> None:
    sent = [cost.bytes_sent for cost in all_reduce_cost(Algorithm("tree"), 6, 10).addresses]
    assert sent == [30, 10, 20, 10, 20, 10]


def test_halving_folds_what_is_beyond_a_power_of_two() -> None:
    assert all_reduce_cost(Algorithm("halving_doubling"), 8, 800).rounds == 6
    folded = all_reduce_cost(Algorithm("halving_doubling"), 9, 800)
    assert folded.rounds == 8 and folded.addresses[1].bytes_sent == 800 and folded.total_bytes == 2 * 8 * 800


def test_two_levels_take_fewer_rounds_by_halving_than_by_ring() -> None:
    """12 ranks on 3 hosts: halving inside, where there are 4; a ring of 3 between."""
    by_ring, by_halving = (all_reduce_cost(Algorithm("hierarchical", 4, by), 12, 1200) for by in ("ring", "halving"))
    assert (by_ring.rounds, by_halving.rounds) == (10, 8) and by_ring.total_bytes == by_halving.total_bytes


@pytest.mark.parametrize("name", ALL_REDUCE_ALGORITHMS)
def test_every_all_reduce_sends_as_much_in_total(name: str) -> None:
    algorithm = Algorithm(name, 4)  # type: ignore[arg-type]
    assert all_reduce_cost(algorithm, 6, 600).total_bytes == 6000
    assert all_reduce_cost(algorithm, 1, 600).busiest == Cost()


def test_estimate_adds_latency_bytes_and_reduction() -> None:
    cost = all_reduce_cost(Algorithm("tree"), 2, 10)
    assert estimate(cost, alpha=1.0, beta=0.1, gamma=0.01) == pytest.approx(2 + 2 + 0.1)


def test_addresses_of_one_process_send_and_hold_together_and_wait_side_by_side() -> None:
    roles = assign_roles(1, "servers", holders=(0,))
    cost = CommunicationCost((Cost(1, 2, 3, 4, 5), Cost(10, 1, 30, 40, 50)), roles)
    assert cost.busiest == Cost(11, 2, 30, 44, 55)
    assert cost.of("server") == Cost(10, 1, 30, 40, 50) and cost.of("worker").bytes_sent == 1
    assert cost.plus(cost).mean_over(2) == CommunicationCost((Cost(1, 2, 3, 4, 10), Cost(10, 1, 30, 40, 100)), roles)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'tree'"):
        all_reduce_cost(Algorithm("tre"), 2, 10)  # type: ignore[arg-type]
    assert collective_cost("all_gather", 1, 10).total_bytes == 0
