"""Who may mix weights with whom: graphs over ranks, and their split into those who ask and those who are asked.

    ring   0 - 1 - 2 - 3      torus   0 - 1 - 2      exponential   rank r hears r-1, r-2, r-4, ...
           +-----------+              |   |   |      complete      rank r hears all
                                      3 - 4 - 5
                                      (and around)

In a split every pair has one who asks, and one who answers and never waits:

    ring of 4   asks     0   2        ring of 5   asks     0   2   4        0 - 4 have the same part,
                         |\\ /|                             |\\ /|\\ /          so this edge is not used
                answers  1   3                    answers  1   3
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["GRAPHS", "Split", "make_split", "num_neighbours"]


def ring(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}


def torus(rank: int, size: int) -> set[int]:
    """Left, right, above and below on the grid that is nearest to a square; of a prime number of ranks, a ring."""
    height = next(h for h in range(math.isqrt(size), 0, -1) if size % h == 0)
    width = size // height
    row, column = divmod(rank, width)
    beside = {row * width + (column + shift) % width for shift in (-1, 1)}
    return beside | {(row + shift) % height * width + column for shift in (-1, 1)}


def exponential(rank: int, size: int) -> set[int]:
    """The static exponential graph (Assran et al., 2019): a rank hears those 1, 2, 4, ... before it."""
    return {(rank - (1 << k)) % size for k in range((size - 1).bit_length())}


def complete(rank: int, size: int) -> set[int]:
    return set(range(size))


GRAPHS: Mapping[str, Callable[[int, int], set[int]]] = {
    "ring": ring,
    "torus": torus,
    "exponential": exponential,
    "complete": complete,
}
"""From (rank, size) to those whom the rank hears; the rank itself is left out, and nobody counts twice."""


def num_neighbours(graph: str, size: int) -> int:
    """How many ranks each rank hears: as many as rank 0, for these graphs look alike from every rank.

    >>> [num_neighbours(graph, 64) for graph in ("ring", "torus", "exponential", "complete")]
    [2, 4, 6, 63]
    """
    return len(GRAPHS[graph](0, size) - {0})


@dataclass(frozen=True)
class Split:
    """`partners` are, for each rank, its neighbours on the other side."""

    asks: tuple[bool, ...]
    partners: tuple[tuple[int, ...], ...]

    @property
    def num_asking(self) -> int:
        return sum(self.asks)

    def loads(self) -> list[float]:
        """How often each rank that answers is asked while every other takes one step, on average."""
        loads = [0.0] * len(self.asks)
        for rank, partners in enumerate(self.partners):
            for partner in partners if self.asks[rank] else ():
                loads[partner] += 1 / len(partners)
        return loads


def make_split(name: str, size: int) -> Split:
    """One after the other, every rank takes the part that fewer of its neighbours before it have; or, of two alike, the
    part that fewer ranks have.

    So each has a neighbour with the other part before it, which makes the edges that are used connect all ranks; and
    at least half of all edges are used. Of a graph without odd cycles all are: the neighbours before have one part.

    >>> make_split("ring", 4)
    Split(asks=(True, False, True, False), partners=((1, 3), (0, 2), (1, 3), (0, 2)))
    """
    hears = [GRAPHS[name](rank, size) - {rank} for rank in range(size)]
    neighbours = [hears[rank] | {other for other in range(size) if rank in hears[other]} for rank in range(size)]
    asks: list[bool] = []
    for rank in range(size):
        before = [asks[other] for other in neighbours[rank] if other < rank]
        surplus = 2 * sum(before) - len(before) or 2 * sum(asks) - len(asks)
        asks.append(surplus <= 0)
    partners = tuple(
        tuple(sorted(other for other in neighbours[rank] if asks[other] != asks[rank])) for rank in range(size)
    )
    return Split(tuple(asks), partners)
