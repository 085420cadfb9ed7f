"""`auto` on the virtual cluster: the forecast is what happens, and what it chooses is the fastest of all topologies."""

import math
from functools import cache

import pytest
import torch

from weft.distributed.collectives import AlgorithmChoice, MessageGroup, choose, probe_all_reduce, probe_network
from weft.distributed.collectives.algorithms import all_reduce_schedule
from weft.distributed.collectives.choice import candidates
from weft.distributed.collectives.forecast import forecast
from weft.distributed.collectives.moves import part_bounds
from weft.distributed.group import AbstractGroup, AllReduce
from weft.distributed.place import with_topology
from weft.distributed.virtual import run_virtual
from weft.planning.cluster import Link
from weft.planning.collective_cost import Algorithm, all_reduce_cost
from weft.planning.cost import estimate
from weft.planning.network import TEN_GIGABIT, NetworkModel, SlowPair
from weft.specs import parse_plan

INSIDE = Link(alpha=2e-6, beta=1e-10)


def two_levels(ranks_per_host: int, alpha: float = 3e-5, beta: float = 8e-10, gamma: float = 0.0) -> NetworkModel:
    return NetworkModel(Link(alpha, beta), INSIDE, ranks_per_host, host_beta=beta, gamma=gamma)


CLUSTERS: dict[str, tuple[int, NetworkModel]] = {
    "one level of 8": (8, TEN_GIGABIT),
    "one level of 6": (6, TEN_GIGABIT),
    "2 hosts of 4": (8, two_levels(4)),
    "4 hosts of 2": (8, two_levels(2, gamma=1e-10)),
    "3 hosts of 4": (12, two_levels(4)),
    "8 hosts of 4, slow lines": (32, two_levels(4, beta=8e-9)),
    "4 hosts of 4, high latency": (16, two_levels(4, alpha=1e-3)),
    "4 hosts of 4, high bandwidth": (16, two_levels(4, beta=4e-11)),
    "hosts of 4, the last with 2": (6, two_levels(4)),
}
SIZES = (8, 4096, 65_536, 1 << 20, 1 << 22)


@cache
def seconds_of(cluster: str, num_bytes: int, algorithm: Algorithm | None) -> float:
    """That an all-reduce takes on the virtual cluster; of None, what the cluster chooses."""
    size, network = CLUSTERS[cluster]
    choice = None if algorithm is None else AlgorithmChoice(algorithm.name, algorithm.inner or None, algorithm.by)

    def program(group: AbstractGroup) -> None:
        group.all_reduce(torch.zeros(num_bytes // 4))

    return max(run_virtual(program, size, network=network, choice=choice).seconds)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    "num_bytes", [pytest.param(n, marks=pytest.mark.long if n in SIZES[1::2] else ()) for n in SIZES]
)
def test_auto_is_as_fast_as_the_fastest(cluster: str, num_bytes: int) -> None:
    """It was the slowest of four on two levels: 80 ms for 16 MB on 4 hosts of 4, where hierarchical(4) takes 23."""
    every = {algorithm: seconds_of(cluster, num_bytes, algorithm) for algorithm in candidates(CLUSTERS[cluster][0])}
    assert seconds_of(cluster, num_bytes, None) <= 1.001 * min(every.values()), every


def test_a_choice_that_knows_no_levels_is_found_out() -> None:
    """The one of before: by the formulas, on the line between hosts, among four."""
    cluster, num_bytes = "8 hosts of 4, slow lines", 1 << 22
    size, network = CLUSTERS[cluster]
    flat = [Algorithm(name) for name in ("direct", "ring", "halving_doubling", "tree")]
    link = network.between
    old = min(flat, key=lambda a: estimate(all_reduce_cost(a, size, num_bytes), link.alpha, link.beta))
    every = [seconds_of(cluster, num_bytes, algorithm) for algorithm in candidates(size)]
    assert seconds_of(cluster, num_bytes, old) > 3 * min(every)


@pytest.mark.parametrize("cluster", ["one level of 6", "4 hosts of 2", "3 hosts of 4", "hosts of 4, the last with 2"])
@pytest.mark.parametrize("length", [1, 5, 1000])
def test_a_forecast_is_what_happens(cluster: str, length: int) -> None:
    """Also where parts of the message are empty."""
    size, network = CLUSTERS[cluster]
    for algorithm in candidates(size):
        schedules = [all_reduce_schedule(algorithm, rank, size) for rank in range(size)]
        bounds = [4 * bound for bound in part_bounds(length, schedules[0].num_parts)]
        seconds = seconds_of(cluster, 4 * length, algorithm)
        assert forecast(schedules, bounds, network, range(size)) == pytest.approx(seconds), algorithm


def test_a_forecast_ends_where_it_cannot_win() -> None:
    schedules = [all_reduce_schedule(Algorithm("ring"), rank, 4) for rank in range(4)]
    bounds = [0, 10, 20, 30, 40]
    seconds = forecast(schedules, bounds, TEN_GIGABIT, range(4))
    assert forecast(schedules, bounds, TEN_GIGABIT, range(4), limit=seconds) == seconds
    assert forecast(schedules, bounds, TEN_GIGABIT, range(4), limit=seconds / 2) == math.inf


def test_a_slow_link_is_gone_around() -> None:
    """Ranks 1 and 2 are neighbours on a ring, and send each other nothing where 4 ranks halve and double."""
    slow = NetworkModel(TEN_GIGABIT.between, slow=(SlowPair(1, 2, 50.0), SlowPair(2, 1, 50.0)))
    assert (
        choose(TEN_GIGABIT, 4, 1 << 20).algorithm == choose(slow, 4, 1 << 20).algorithm == Algorithm("halving_doubling")
    )
    assert choose(slow, 4, 1 << 20).seconds == choose(TEN_GIGABIT, 4, 1 << 20).seconds


def test_a_part_of_the_ranks_has_the_places_of_its_own() -> None:
    """Of 2 hosts of 4, the ranks of one host have its fast links; the first ones of each have the line between."""
    _, network = CLUSTERS["2 hosts of 4"]
    inside, across = choose(network, 4, 1 << 20, (4, 5, 6, 7)), choose(network, 2, 1 << 20, (0, 4))
    assert inside.seconds < 0.25e-3 < 0.75e-3 < across.seconds

    def program(group: AbstractGroup) -> float:
        part = group.split(group.rank % 4, group.rank)
        group.barrier()
        began = group.clock.now()
        part.all_reduce(torch.zeros(1 << 18))
        return group.clock.now() - began

    # Four pairs share the line.
    assert max(run_virtual(program, 8, network=network).results) > across.seconds


def test_parts_of_a_message_group_know_their_places() -> None:
    seen = []

    def program(group: AbstractGroup) -> None:
        messages = MessageGroup(group, AlgorithmChoice(network=two_levels(2)))
        part = messages.split(group.rank % 2, -group.rank).split(0, group.rank)
        part.all_reduce(torch.ones(3))
        if group.rank == 1:
            seen.append(part._choice.ranks)  # type: ignore[attr-defined]

    run_virtual(program, 6)
    assert seen == [(1, 3, 5)]


# ---- the probe


def test_the_probe_finds_both_levels_and_the_line_that_ranks_share() -> None:
    network = two_levels(3)
    found = run_virtual(lambda group: probe_network(group, 3), 6, network=network).results
    assert all(model == found[0] for model in found)
    model = found[0]
    assert model.ranks_per_host == 3 and model.inside is not None
    assert (model.inside.alpha, model.inside.beta) == pytest.approx((INSIDE.alpha, INSIDE.beta), rel=1e-6)
    assert (model.between.alpha, model.between.beta) == pytest.approx((3e-5, 8e-10), rel=1e-6)
    assert model.host_beta == pytest.approx(8e-10, rel=0.01)


def test_a_line_that_nobody_shares_is_no_bottleneck() -> None:
    network = NetworkModel(Link(3e-5, 8e-10), INSIDE, 2)
    model = run_virtual(lambda group: probe_network(group, 2), 4, network=network).results[0]
    assert model.host_beta == pytest.approx(4e-10, rel=0.01)


def test_hosts_that_differ_count_as_one_level() -> None:
    program = lambda group: probe_network(group, 2 if group.rank < 4 else 1)  # noqa: E731
    model = run_virtual(program, 5, network=TEN_GIGABIT).results[0]
    assert model.ranks_per_host is None and model.between.beta == pytest.approx(8e-10, rel=1e-6)
    assert run_virtual(probe_network, 2).results[0].ranks_per_host is None


def test_auto_leaves_a_message_to_a_transport_that_is_faster() -> None:
    def program(group: AbstractGroup) -> tuple[bool, bool]:
        points = probe_all_reduce(group, (8, 1024))
        told = [tuple((size, factor * seconds) for size, seconds in points) for factor in (0.5, 2)]
        fast, slow = (AlgorithmChoice(native=native).algorithm(4, 512) is None for native in told)
        return fast, slow

    assert run_virtual(program, 4).results == ((True, False),) * 4


def test_auto_measures_and_adds_up_what_it_carries_by_messages_and_by_itself() -> None:
    def program(group: AbstractGroup) -> list[float]:
        chosen = with_topology(group, parse_plan("data=4 topology=auto"), 2)
        assert isinstance(chosen, MessageGroup)
        totals = [torch.full((size,), 1.0 + group.rank) for size in (1, 1000, 100_000)]
        for work in [chosen.start(AllReduce(total)) for total in totals]:
            work.wait()
        return [float(total.mean()) for total in totals]

    assert run_virtual(program, 4, network=two_levels(2)).results == ([10.0] * 3,) * 4
