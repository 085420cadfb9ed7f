"""Which all-reduce for which message: a fixed one, or the one that a network makes the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from weft.distributed.collectives.algorithms import all_reduce_schedule
from weft.distributed.collectives.forecast import forecast
from weft.distributed.collectives.moves import part_bounds
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

WORD = 4
"""Bytes of a number of a message, which is not cut."""

ROUNDING = 1 + 1e-9
"""Times that differ by less are alike."""


@dataclass(frozen=True)
class Fastest:
    """The all-reduce that is the fastest for a message, and the seconds that it is expected to take."""

    algorithm: Algorithm
    seconds: float


@lru_cache(1024)
def choose(network: NetworkModel, size: int, num_bytes: int, ranks: tuple[int, ...] = ()) -> Fastest:
    """The fastest all-reduce among so many ranks of a network. At equal times the first of `candidates` wins.

    Args:
        ranks: their places in the network; the first ones if not given.

    >>> choose(TEN_GIGABIT, 6, 8).algorithm.name, str(choose(TEN_GIGABIT, 6, 100_000_000).algorithm)
    ('tree', 'hierarchical(2)')
    """
    fastest = min((network.between, network.inside or network.between), key=lambda link: (link.beta, link.alpha))
    least = min(network.between.alpha, fastest.alpha)
    estimates = {
        algorithm: estimate(all_reduce_cost(algorithm, size, num_bytes), least, fastest.beta, network.gamma)
        for algorithm in candidates(size)
    }
    seconds: dict[Algorithm, float] = {}
    best = float("inf")
    for algorithm in sorted(estimates, key=estimates.__getitem__):
        # No all-reduce takes less than half of its formula's time on the fastest link; see there what it overstates.
        if estimates[algorithm] / 2 <= best:
            limit = best * ROUNDING
            seconds[algorithm] = _forecast(algorithm, network, size, num_bytes, ranks or range(size), limit)
            best = min(best, seconds[algorithm])
    first = next(algorithm for algorithm in estimates if seconds.get(algorithm, float("inf")) <= best * ROUNDING)
    return Fastest(first, best)


def candidates(size: int) -> Iterator[Algorithm]:
    """Every all-reduce. The direct one is the first, because it keeps the order of ranks."""
    for name in ("direct", "ring", "halving_doubling", "tree"):
        yield Algorithm(name)
    for inner in (inner for inner in range(2, size // 2 + 1) if size % inner == 0):
        yield Algorithm("hierarchical", inner)
        if is_power_of_two(inner) or is_power_of_two(size // inner):
            yield Algorithm("hierarchical", inner, "halving")


def _forecast(
    algorithm: Algorithm, network: NetworkModel, size: int, num_bytes: int, ranks: Sequence[int], limit: float
) -> float:
    schedules = [all_reduce_schedule(algorithm, rank, size) for rank in range(size)]
    bounds = [WORD * bound for bound in part_bounds(-(-num_bytes // WORD), schedules[0].num_parts)]
    return forecast(schedules, bounds, network, ranks, limit)


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

    def algorithm(self, size: int, num_bytes: int) -> Algorithm | None:
        """The algorithm for one message; None where it is the transport's own."""
        if self.name == "native":
            return None
        if self.name == "auto":
            chosen = choose(self.network, size, num_bytes, self.ranks)
            is_native = bool(self.native) and interpolate(self.native, num_bytes) <= chosen.seconds
            return None if is_native else chosen.algorithm
        assert self.name in ALL_REDUCE_ALGORITHMS
        return Algorithm(self.name, self.ranks_per_host or 0, self.by)


def interpolate(points: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Seconds for a message: on the line through the two nearest points.

    >>> interpolate([(0, 1.0), (10, 2.0), (20, 4.0)], 15), interpolate([(0, 1.0), (10, 2.0), (20, 4.0)], 40)
    (3.0, 8.0)
    """
    after = next((i for i in range(1, len(points)) if points[i][0] >= num_bytes), len(points) - 1)
    (small, fast), (large, slow) = points[after - 1], points[after]
    return fast + (slow - fast) * (num_bytes - small) / (large - small)
