"""What each collective costs, as data: the formulas of the textbook for N ranks and a message of m bytes.

They live here, below the collectives that they describe, because the planner may not import what carries a plan out.
They are exact where N divides the message; a ragged message adds at most one element a round.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from weft.errors import UsageError, nearest

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "AllReduceAlgorithm",
    "CollectiveName",
    "Cost",
    "all_reduce_cost",
    "collective_cost",
    "estimate",
]

AllReduceAlgorithm = Literal["direct", "halving_doubling", "hierarchical", "ring", "tree"]
ALL_REDUCE_ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)

CollectiveName = Literal[
    "all_gather", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"
]


@dataclass(frozen=True)
class Cost:
    """Rounds, and bytes.

    Along the path (the largest message of each round, summed): `path_bytes` sent, `path_reduced` reduced. `rank_bytes`
    is what the busiest rank sends, `total_bytes` what all ranks send.
    """

    rounds: int
    path_bytes: float
    path_reduced: float
    rank_bytes: float
    total_bytes: float


NOTHING = Cost(0, 0.0, 0.0, 0.0, 0.0)


def estimate(cost: Cost, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Seconds on a network without contention.

    >>> estimate(all_reduce_cost("ring", 4, 1000), alpha=1.0, beta=0.001)
    7.5
    """
    return cost.rounds * alpha + cost.path_bytes * beta + cost.path_reduced * gamma


def all_reduce_cost(
    algorithm: AllReduceAlgorithm, size: int, num_bytes: float, *, ranks_per_host: int | None = None
) -> Cost:
    """Cost of an all-reduce. Every algorithm sends 2(N-1)m in total; they differ in who sends it, and when."""
    if size == 1:
        return NOTHING
    if algorithm in ("ring", "direct"):
        return _ring(size, num_bytes)
    if algorithm == "tree":
        depth = log2_ceil(size)
        return Cost(2 * depth, 2 * depth * num_bytes, depth * num_bytes, depth * num_bytes, 2 * (size - 1) * num_bytes)
    if algorithm == "halving_doubling":
        return _halving_doubling(size, num_bytes)
    if algorithm == "hierarchical":
        return _hierarchical(size, num_bytes, ranks_per_host or size)
    raise UsageError(f"unknown all-reduce ({algorithm!r}); {nearest(algorithm, ALL_REDUCE_ALGORITHMS)}")


def collective_cost(name: CollectiveName, size: int, num_bytes: float) -> Cost:
    """Cost of the other collectives; `num_bytes` is the larger of a rank's input and output, and 1 for a barrier."""
    if size == 1:
        return NOTHING
    depth = log2_ceil(size)
    share = (size - 1) / size * num_bytes
    total = (size - 1) * num_bytes
    # Of a binomial tree: hops of all parts, and the largest subtree below the root, in parts of m/N.
    hops = sum(rank.bit_count() for rank in range(size)) / size * num_bytes
    subtree = max(size - (1 << (depth - 1)), (1 << depth) // 4) / size * num_bytes
    costs: dict[CollectiveName, Cost] = {
        "all_gather": Cost(size - 1, share, 0.0, share, total),
        "all_to_all": Cost(size - 1, share, 0.0, share, total),
        "barrier": Cost(depth, depth * num_bytes, 0.0, depth * num_bytes, size * depth * num_bytes),
        "broadcast": Cost(depth, depth * num_bytes, 0.0, depth * num_bytes, total),
        "gather": Cost(depth, share, 0.0, subtree, hops),
        "reduce": Cost(depth, depth * num_bytes, depth * num_bytes, num_bytes, total),
        "reduce_scatter": Cost(size - 1, share, share, share, total),
        "scatter": Cost(depth, share, 0.0, share, hops),
    }
    return costs[name]


def log2_ceil(size: int) -> int:
    return (size - 1).bit_length()


def _ring(size: int, num_bytes: float) -> Cost:
    share = (size - 1) / size * num_bytes
    return Cost(2 * (size - 1), 2 * share, share, 2 * share, 2 * (size - 1) * num_bytes)


def _halving_doubling(size: int, num_bytes: float) -> Cost:
    power = 1 << (size.bit_length() - 1)
    share = (power - 1) / power * num_bytes
    fold = num_bytes if size > power else 0.0
    rounds = 2 * log2_ceil(power) + (2 if fold else 0)
    return Cost(rounds, 2 * (share + fold), share + fold, 2 * share + fold, 2 * (size - 1) * num_bytes)


def _hierarchical(size: int, num_bytes: float, ranks_per_host: int) -> Cost:
    num_hosts = -(-size // ranks_per_host)
    total = 2 * (size - 1) * num_bytes
    between = (num_hosts - 1) / num_hosts * num_bytes
    if size % ranks_per_host == 0:
        share = (size - 1) / size * num_bytes
        return Cost(2 * (ranks_per_host - 1 + num_hosts - 1), 2 * share, share, 2 * share, total)
    if num_hosts == 1:
        return all_reduce_cost("ring", size, num_bytes)
    depth = log2_ceil(ranks_per_host)
    return Cost(
        2 * (depth + num_hosts - 1),
        2 * (depth * num_bytes + between),
        depth * num_bytes + between,
        2 * between + depth * num_bytes,
        total,
    )
