"""Which sparse sum: the cheapest by its cost, on links of a fitted latency and bandwidth."""

from functools import lru_cache

from weft.planning.cluster import Link
from weft.planning.cost import estimate
from weft.planning.sparse_cost import SPARSE_ALGORITHMS, SparseAlgorithm, Supports, sparse_cost

__all__ = ["choose_algorithm", "forecast_sums"]


@lru_cache(1024)
def choose_algorithm(
    size: int, supports: Supports, link: Link, gathered_bytes: float | None = None, gamma: float = 0.0
) -> SparseAlgorithm:
    """The cheapest sparse sum. All ranks must choose the same, so all must give the same: as entries of a rank those
    that the plan says (its ratio times the length), and as entries of the sum, where they are known, those of the last
    sum, which all ranks have.

    Args:
        size: how many ranks there are.
        supports: of their entries.
        link: of a probe; a message of n bytes takes alpha + n * beta.
        gathered_bytes: of a value in the dense phase, where it would be quantised.
        gamma: seconds to add one byte.

    >>> slow = Link(alpha=1e-4, beta=8e-9)
    >>> choose_algorithm(4, Supports(1_000_000, 100), slow), choose_algorithm(4, Supports(1_000_000, 10_000), slow)
    ('gather', 'recursive_doubling')
    """
    seconds = forecast_sums(size, supports, link, gathered_bytes, gamma)
    return min(seconds, key=seconds.__getitem__)


def forecast_sums(
    size: int, supports: Supports, link: Link, gathered_bytes: float | None = None, gamma: float = 0.0
) -> dict[SparseAlgorithm, float]:
    """Seconds of each algorithm; the arguments are those of `choose_algorithm`."""
    return {
        algorithm: estimate(sparse_cost(algorithm, size, supports, gathered_bytes), link.alpha, link.beta, gamma)
        for algorithm in SPARSE_ALGORITHMS
    }
