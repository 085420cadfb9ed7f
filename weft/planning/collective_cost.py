"""The cost of communication as data, and that of each collective: the textbook's formulas for N ranks and m bytes.

They live here, below the collectives that they describe, because the planner may not import what carries a plan out.
They are exact where N divides the message; a ragged message adds at most one element a round.
"""

from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Literal, get_args

from weft.errors import UsageError, nearest

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "AllReduceAlgorithm",
    "CollectiveName",
    "CommunicationCost",
    "all_reduce_cost",
    "collective_cost",
    "estimate",
]

AllReduceAlgorithm = Literal["direct", "halving_doubling", "hierarchical", "ring", "tree"]
ALL_REDUCE_ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)

CollectiveName = Literal["all_gather", "all_to_all", "barrier", "broadcast", "reduce", "reduce_scatter"]


@dataclass(frozen=True)
class CommunicationCost:
    """Of a collective, or of a step of a plan, on average.

    Args:
        rounds: messages that a rank waits for, one after the other.
        path_bytes, path_reduced: bytes sent and reduced meanwhile: the largest message of each round, summed.
        rank_bytes: what the busiest rank sends.
        total_bytes: what all ranks send.
        between_bytes: of these, what host servers and shards send each other.
        copies: how many times the weights are kept besides the model's own.
    """

    rounds: float
    path_bytes: float
    path_reduced: float
    rank_bytes: float
    total_bytes: float
    between_bytes: float = 0.0
    copies: int = 0

    def plus(self, other: "CommunicationCost") -> "CommunicationCost":
        """Of both, one after the other."""
        return CommunicationCost(*map(add, astuple(self), astuple(other)))

    def mean_over(self, num_steps: int) -> "CommunicationCost":
        """Of a step, where this is paid once in so many."""
        return replace(CommunicationCost(*(value / num_steps for value in astuple(self))), copies=self.copies)


NOTHING = CommunicationCost(0, 0.0, 0.0, 0.0, 0.0)


def estimate(cost: CommunicationCost, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Seconds on a network without contention.

    >>> estimate(all_reduce_cost("ring", 4, 1000), alpha=1.0, beta=0.001)
    7.5
    """
    return cost.rounds * alpha + cost.path_bytes * beta + cost.path_reduced * gamma


def all_reduce_cost(
    algorithm: AllReduceAlgorithm, size: int, num_bytes: float, *, ranks_per_host: int | None = None
) -> CommunicationCost:
    """Cost of an all-reduce. Every algorithm sends 2(N-1)m in total; they differ in who sends it, and when."""
    if size == 1:
        return NOTHING
    if algorithm in ("ring", "direct"):
        return _ring(size, num_bytes)
    if algorithm == "tree":
        depth = log2_ceil(size)
        return CommunicationCost(
            2 * depth, 2 * depth * num_bytes, depth * num_bytes, depth * num_bytes, 2 * (size - 1) * num_bytes
        )
    if algorithm == "halving_doubling":
        return _halving_doubling(size, num_bytes)
    if algorithm == "hierarchical":
        return _hierarchical(size, num_bytes, ranks_per_host or size)
    raise UsageError(f"unknown all-reduce ({algorithm!r}); {nearest(algorithm, ALL_REDUCE_ALGORITHMS)}")


def collective_cost(name: CollectiveName, size: int, num_bytes: float) -> CommunicationCost:
    """Cost of the other collectives; `num_bytes` is the larger of a rank's input and output, and 1 for a barrier."""
    if size == 1:
        return NOTHING
    depth = log2_ceil(size)
    share = (size - 1) / size * num_bytes
    total = (size - 1) * num_bytes
    costs: dict[CollectiveName, CommunicationCost] = {
        "all_gather": CommunicationCost(size - 1, share, 0.0, share, total),
        "all_to_all": CommunicationCost(size - 1, share, 0.0, share, total),
        "barrier": CommunicationCost(depth, depth * num_bytes, 0.0, depth * num_bytes, size * depth * num_bytes),
        "broadcast": CommunicationCost(depth, depth * num_bytes, 0.0, depth * num_bytes, total),
        "reduce": CommunicationCost(depth, depth * num_bytes, depth * num_bytes, num_bytes, total),
        "reduce_scatter": CommunicationCost(size - 1, share, share, share, total),
    }
    return costs[name]


def log2_ceil(size: int) -> int:
    return (size - 1).bit_length()


def _ring(size: int, num_bytes: float) -> CommunicationCost:
    share = (size - 1) / size * num_bytes
    return CommunicationCost(2 * (size - 1), 2 * share, share, 2 * share, 2 * (size - 1) * num_bytes)


def _halving_doubling(size: int, num_bytes: float) -> CommunicationCost:
    power = 1 << (size.bit_length() - 1)
    share = (power - 1) / power * num_bytes
    fold = num_bytes if size > power else 0.0
    rounds = 2 * log2_ceil(power) + (2 if fold else 0)
    return CommunicationCost(rounds, 2 * (share + fold), share + fold, 2 * share + fold, 2 * (size - 1) * num_bytes)


def _hierarchical(size: int, num_bytes: float, ranks_per_host: int) -> CommunicationCost:
    num_hosts = -(-size // ranks_per_host)
    total = 2 * (size - 1) * num_bytes
    between = (num_hosts - 1) / num_hosts * num_bytes
    if size % ranks_per_host == 0:
        share = (size - 1) / size * num_bytes
        return CommunicationCost(2 * (ranks_per_host - 1 + num_hosts - 1), 2 * share, share, 2 * share, total)
    if num_hosts == 1:
        return all_reduce_cost("ring", size, num_bytes)
    depth = log2_ceil(ranks_per_host)
    return CommunicationCost(
        2 * (depth + num_hosts - 1),
        2 * (depth * num_bytes + between),
        depth * num_bytes + between,
        2 * between + depth * num_bytes,
        total,
    )
