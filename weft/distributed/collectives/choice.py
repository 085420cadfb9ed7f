"""Which all-reduce for which message: a fixed name, or the one that alpha, beta and gamma make the fastest."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from weft.errors import UsageError, nearest
from weft.planning.collective_cost import ALL_REDUCE_ALGORITHMS, AllReduceAlgorithm, all_reduce_cost, estimate

__all__ = ["AlgorithmChoice", "AlgorithmName", "choose"]

AlgorithmName = Literal["auto", "direct", "halving_doubling", "hierarchical", "native", "ring", "tree"]

# Two levels need a cluster with two kinds of links, which one alpha and beta do not describe. At equal cost the first
# wins: the direct one keeps the order of ranks.
COMPARED: tuple[AllReduceAlgorithm, ...] = ("direct", "ring", "halving_doubling", "tree")


@lru_cache(1024)
def choose(size: int, num_bytes: int, alpha: float, beta: float, gamma: float = 0.0) -> AllReduceAlgorithm:
    """The fastest all-reduce on a network without contention.

    Args:
        alpha: seconds of a message; `beta` of each of its bytes, `gamma` of each byte that is reduced.

    >>> choose(6, 8, alpha=1e-5, beta=1e-9), choose(6, 100_000_000, alpha=1e-5, beta=1e-9)
    ('halving_doubling', 'direct')
    """
    return min(COMPARED, key=lambda name: estimate(all_reduce_cost(name, size, num_bytes), alpha, beta, gamma))


@dataclass(frozen=True)
class AlgorithmChoice:
    """`auto` chooses by message size; `native` leaves every call to the transport's own implementation.

    The defaults of alpha (seconds per message) and beta (seconds per byte) are those of a plain 10 Gbit/s network.
    """

    name: AlgorithmName = "auto"
    ranks_per_host: int | None = None
    alpha: float = 3e-5
    beta: float = 8e-10
    gamma: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in get_args(AlgorithmName):
            cure = nearest(self.name, get_args(AlgorithmName))
            raise UsageError(f"unknown all-reduce ({self.name!r}); {cure}")
        if self.name == "hierarchical" and not self.ranks_per_host:
            raise UsageError("hierarchical all-reduce needs hosts (ranks_per_host: None); give the ranks per host")

    def algorithm(self, size: int, num_bytes: int) -> AllReduceAlgorithm:
        """The algorithm for one message; not for `native`."""
        if self.name == "auto":
            return choose(size, num_bytes, self.alpha, self.beta, self.gamma)
        assert self.name in ALL_REDUCE_ALGORITHMS
        return self.name
