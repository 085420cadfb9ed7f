"""Which all-reduce for which message: a fixed one, or the one that a network makes the fastest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from weft.distributed.collectives.algorithms import all_reduce_schedule
from weft.distributed.collectives.forecast import forecast
from weft.distributed.collectives.moves import Action, part_bounds
from weft.errors import UsageError, nearest
from weft.planning.collective_cost import (
    ALL_REDUCE_ALGORITHMS,
    Algorithm,
    LevelAlgorithm,
    all_reduce_cost,
    is_power_of_two,
)
from weft.planning.cost import estimate
from weft.planning.network import TEN_GIGABIT, NetworkModel

__all__ = ["AlgorithmChoice", "AlgorithmName", "Fastest", "choose"]

AlgorithmName = Literal["auto", "direct", "halving_doubling", "hierarchical", "native", "ring", "tree"]

MOST_MESSAGES = 1 << 17
"""Of an all-reduce that is played: a ring of 256 ranks, which takes half a second."""

ROUNDING = 1 + 1e-9
"""Times that differ by less are alike, and the one that was tried first stays."""


@dataclass(frozen=True)
class Fastest:
    """The all-reduce that is the fastest for a message, and the seconds that it is expected to take."""

    algorithm: Algorithm
    seconds: float


@lru_cache(1024)
def choose(
    network: NetworkModel, size: int, num_bytes: int, ranks: tuple[int, ...] = (), element_bytes: int = 4
) -> Fastest:
    """The fastest all-reduce among so many ranks of a network.

    Args:
        ranks: their places in the network; the first ones if not given.
        element_bytes: of a number of the message, which is not cut.

    >>> choose(TEN_GIGABIT, 6, 4096).algorithm.name, str(choose(TEN_GIGABIT, 6, 100_000_000).algorithm)
    ('tree', 'hierarchical(2)')
    """
    places = ranks or tuple(range(size))
    message = _Message(num_bytes, element_bytes)
    bounds = {algorithm: _bound(algorithm, network, message, places) for algorithm in candidates(size)}
    best = Fastest(Algorithm("direct"), math.inf)
    for algorithm in sorted(bounds, key=bounds.__getitem__):
        limit = best.seconds / ROUNDING
        if bounds[algorithm] < limit:
            schedules = [all_reduce_schedule(algorithm, rank, size) for rank in range(size)]
            seconds = forecast(schedules, message.cuts(schedules[0].num_parts), network, places, limit)
            best = Fastest(algorithm, seconds) if seconds < limit else best
    return best


def candidates(size: int) -> Iterator[Algorithm]:
    """Every all-reduce, but of many ranks those of too many messages. The direct one is the first, because it keeps the
    order of ranks."""
    flat = [Algorithm(name) for name in ("direct", "ring", "halving_doubling", "tree")]
    inners = [inner for inner in range(2, size // 2 + 1) if size % inner == 0]
    halved = [inner for inner in inners if is_power_of_two(inner) or is_power_of_two(size // inner)]
    rings = [Algorithm("hierarchical", inner) for inner in inners]
    for algorithm in (*flat, *rings, *(Algorithm("hierarchical", inner, "halving") for inner in halved)):
        if size * all_reduce_cost(algorithm, size, 0).rounds <= MOST_MESSAGES:
            yield algorithm


@dataclass(frozen=True)
class _Message:
    num_bytes: int
    element_bytes: int

    def cuts(self, num_parts: int) -> list[int]:
        """Where its parts begin and end, in bytes."""
        num_elements = -(-self.num_bytes // self.element_bytes)
        return [self.element_bytes * bound for bound in part_bounds(num_elements, num_parts)]


def _bound(algorithm: Algorithm, network: NetworkModel, message: _Message, ranks: Sequence[int]) -> float:
    """Seconds that it takes at the least, found without playing it: what its formula says if all links were the best,
    and what the first host sends over its line."""
    size, inside = len(ranks), network.inside or network.between
    alpha, beta = min(inside.alpha, network.between.alpha), min(inside.beta, network.between.beta)
    formula = estimate(all_reduce_cost(algorithm, size, message.num_bytes), alpha, beta, network.gamma)
    # Of a small message, of which many parts are empty, formulas say up to twice as much, and of a tree that lacks
    # branches, whose messages then overlap.
    is_too_high = message.num_bytes < message.element_bytes * size
    is_too_high = is_too_high or (algorithm.name == "tree" and not is_power_of_two(size))
    bound = formula / 2 if is_too_high else formula
    if network.host_beta is None:
        return bound
    return max(bound, _bytes_leaving(algorithm, network, message, ranks) * network.host_beta)


def _bytes_leaving(algorithm: Algorithm, network: NetworkModel, message: _Message, ranks: Sequence[int]) -> int:
    """That the ranks on the host of the first one send to others."""
    hosts = [network.host_of(rank) for rank in ranks]
    total = 0
    for place in (place for place, host in enumerate(hosts) if host == hosts[0]):
        planned = all_reduce_schedule(algorithm, place, len(ranks))
        cuts = message.cuts(planned.num_parts)
        sends = (move for moves in planned.schedule for move in moves if move.action is Action.SEND)
        total += sum(cuts[m.parts[1]] - cuts[m.parts[0]] for m in sends if hosts[m.peer] != hosts[0])
    return total


@dataclass(frozen=True)
class AlgorithmChoice:
    """`auto` chooses for every message; `native` leaves every call to the transport's own implementation.

    Args:
        ranks_per_host, by: of a hierarchical one.
        network: on which `auto` compares.
        ranks: the places of the ranks in it; the first ones if not given.
        native: what the transport's own all-reduce takes, as (bytes, seconds) of messages that grow; where it is
            given, `auto` may choose it.
    """

    name: AlgorithmName = "auto"
    ranks_per_host: int | None = None
    by: LevelAlgorithm = "ring"
    network: NetworkModel = TEN_GIGABIT
    ranks: tuple[int, ...] = ()
    native: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in get_args(AlgorithmName):
            cure = nearest(self.name, get_args(AlgorithmName))
            raise UsageError(f"unknown all-reduce ({self.name!r}); {cure}")
        if self.name == "hierarchical" and not self.ranks_per_host:
            raise UsageError("hierarchical all-reduce needs hosts (ranks_per_host: None); give the ranks per host")

    def for_part(self, places: Sequence[int]) -> "AlgorithmChoice":
        """The choice in a group of some of the ranks, given by their places among all."""
        return replace(self, ranks=tuple(self.ranks[place] if self.ranks else place for place in places))

    def algorithm(self, size: int, num_bytes: int, element_bytes: int = 4) -> Algorithm | None:
        """The algorithm for one message; None where it is the transport's own."""
        if self.name == "native":
            return None
        if self.name == "auto":
            chosen = choose(self.network, size, num_bytes, self.ranks, element_bytes)
            is_native = bool(self.native) and interpolate(self.native, num_bytes) <= chosen.seconds
            return None if is_native else chosen.algorithm
        assert self.name in ALL_REDUCE_ALGORITHMS
        if self.name == "hierarchical" and size % (self.ranks_per_host or 1):  # a group that is a part of a mesh
            return Algorithm("ring")
        return Algorithm(self.name, self.ranks_per_host or 0, self.by)


def interpolate(points: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Seconds for a message: on the line through the two nearest points.

    >>> interpolate([(0, 1.0), (10, 2.0), (20, 4.0)], 15), interpolate([(0, 1.0), (10, 2.0), (20, 4.0)], 40)
    (3.0, 8.0)
    """
    after = next((i for i in range(1, len(points)) if points[i][0] >= num_bytes), len(points) - 1)
    (small, fast), (large, slow) = points[after - 1], points[after]
    return fast + (slow - fast) * (num_bytes - small) / (large - small)
