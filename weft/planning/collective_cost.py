"""The cost of each collective: the textbook's formulas for N ranks and m bytes, rank by rank.

They live here, below the collectives that they describe, because the planner may not import what carries a plan out.
They are exact where N divides the message; a ragged message adds at most one element a round, and ranks whose part of
a small message is empty wait for less.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from weft.errors import UsageError, nearest
from weft.planning.cost import CommunicationCost, Cost
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.specs.roles import assign_roles

__all__ = [
    "ALL_REDUCE_ALGORITHMS",
    "Algorithm",
    "AllReduceAlgorithm",
    "CollectiveName",
    "LevelAlgorithm",
    "all_reduce_cost",
    "collective_cost",
    "is_power_of_two",
    "log2_ceil",
]

AllReduceAlgorithm = Literal["direct", "halving_doubling", "hierarchical", "ring", "tree"]
ALL_REDUCE_ALGORITHMS: tuple[AllReduceAlgorithm, ...] = get_args(AllReduceAlgorithm)

LevelAlgorithm = Literal["halving", "ring"]

CollectiveName = Literal["all_gather", "all_to_all", "barrier", "broadcast", "reduce", "reduce_scatter"]


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce; one of two levels has inner groups of so many ranks, and goes by ring or by halving in each.

    >>> str(Algorithm("hierarchical", 4, "halving"))
    'hierarchical(4,halving)'
    """

    name: AllReduceAlgorithm
    inner: int = 0
    by: LevelAlgorithm = "ring"

    def __str__(self) -> str:
        if self.name != "hierarchical":
            return self.name
        return f"hierarchical({self.inner}{'' if self.by == 'ring' else f',{self.by}'})"


def all_reduce_cost(algorithm: Algorithm, size: int, num_bytes: float) -> CommunicationCost:
    """Cost of an all-reduce, by the row of its topology. Every algorithm sends 2(N-1)m in total; they differ in who
    sends it, and when."""
    if algorithm.name not in ALL_REDUCE_ALGORITHMS:
        raise UsageError(f"unknown all-reduce ({algorithm.name!r}); {nearest(algorithm.name, ALL_REDUCE_ALGORITHMS)}")
    if size == 1:
        return _alike(1, Cost())
    formula: Callable[[Algorithm, int, float], CommunicationCost] = load(AXES["topology"][algorithm.name].cost)
    return formula(algorithm, size, num_bytes)


def collective_cost(name: CollectiveName, size: int, num_bytes: float) -> CommunicationCost:
    """Cost of the other collectives, from or to rank 0.

    Args:
        num_bytes: the larger of a rank's input and output, and 1 for a barrier.
    """
    if size == 1:
        return _alike(1, Cost())
    depth = log2_ceil(size)
    share = (size - 1) / size * num_bytes
    if name in ("all_gather", "all_to_all"):
        return _alike(size, Cost(share, size - 1, share))
    if name == "reduce_scatter":
        return _alike(size, Cost(share, size - 1, share, share))
    if name == "barrier":
        return _alike(size, Cost(depth * num_bytes, depth, depth * num_bytes))
    rounds, path = _tree_rounds(size), depth * num_bytes
    num_children = [_num_children(rank, size) for rank in range(size)]
    if name == "broadcast":
        return _costs(Cost(children * num_bytes, rounds, path) for children in num_children)
    return _costs(
        Cost(num_bytes if rank else 0.0, rounds, path, children * num_bytes)
        for rank, children in enumerate(num_children)
    )


def log2_ceil(size: int) -> int:
    return (size - 1).bit_length()


def is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


# Rows of the topology axis: functions of (algorithm, size, num_bytes), for two ranks or more.


def ring(algorithm: Algorithm, size: int, num_bytes: float) -> CommunicationCost:
    share = (size - 1) / size * num_bytes
    return _alike(size, Cost(2 * share, 2 * (size - 1), 2 * share, share))


def tree(algorithm: Algorithm, size: int, num_bytes: float) -> CommunicationCost:
    rounds, path = 2 * _tree_rounds(size), 2 * log2_ceil(size) * num_bytes
    return _costs(
        Cost((children + bool(rank)) * num_bytes, rounds, path, children * num_bytes)
        for rank, children in ((rank, _num_children(rank, size)) for rank in range(size))
    )


def halving_doubling(algorithm: Algorithm, size: int, num_bytes: float) -> CommunicationCost:
    """Of the ranks beyond a power of two, each second one of the first folds into the one before it."""
    power = 1 << (size.bit_length() - 1)
    share, num_folded = (power - 1) / power * num_bytes, size - power
    fold = num_bytes if num_folded else 0.0
    rounds, path = 2 * log2_ceil(power) + (2 if num_folded else 0), 2 * (share + fold)
    alone = Cost(2 * share, rounds, path, share)
    host = Cost(2 * share + fold, rounds, path, share + fold)
    guest = Cost(fold, rounds, path)
    return _costs([host, guest] * num_folded + [alone] * (size - 2 * num_folded))


def hierarchical(algorithm: Algorithm, size: int, num_bytes: float) -> CommunicationCost:
    inner = min(algorithm.inner or size, size)
    num_hosts = -(-size // inner)
    if size % inner == 0:
        share = (size - 1) / size * num_bytes
        rounds = 2 * (_level_rounds(inner, algorithm.by) + _level_rounds(num_hosts, algorithm.by))
        return _alike(size, Cost(2 * share, rounds, 2 * share, share))
    return _ragged_hierarchical(size, inner, num_hosts, num_bytes)


def _ragged_hierarchical(size: int, inner: int, num_hosts: int, num_bytes: float) -> CommunicationCost:
    """Trees inside hosts, a ring among their first ranks."""
    between, depth = (num_hosts - 1) / num_hosts * num_bytes, log2_ceil(inner)
    rounds, path = 2 * (_tree_rounds(inner) + num_hosts - 1), 2 * (depth * num_bytes + between)
    costs = []
    for rank in range(size):
        host, place = divmod(rank, inner)
        children = _num_children(place, min(inner, size - host * inner)) * num_bytes
        leads = place == 0
        sent = children + (2 * between if leads else num_bytes)
        costs.append(Cost(sent, rounds, path, children + (between if leads else 0.0)))
    return _costs(costs)


def _level_rounds(size: int, by: LevelAlgorithm) -> int:
    return log2_ceil(size) if by == "halving" and is_power_of_two(size) else size - 1


def _tree_rounds(size: int) -> int:
    """Of a binomial tree, one way. Where the last branches are missing, rank 0 gets messages one after the other that
    were sent side by side; so the bytes of the path are those of all branches."""
    return size.bit_length() - 1


def _num_children(place: int, size: int) -> int:
    """In a binomial tree: of rank 0 those at 1, 2, 4, ...; of others as far as their lowest bit."""
    lowest = place & -place or size
    return sum(1 for k in range(log2_ceil(size)) if (1 << k) < lowest and place + (1 << k) < size)


def _alike(size: int, cost: Cost) -> CommunicationCost:
    return _costs([cost] * size)


def _costs(costs: Iterable[Cost]) -> CommunicationCost:
    addresses = tuple(costs)
    return CommunicationCost(addresses, assign_roles(len(addresses), "all_reduce"))
