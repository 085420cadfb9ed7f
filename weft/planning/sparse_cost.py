"""The cost of sparse sums as data: four algorithms, rank by rank, from where the entries of ranks lie.

    P ranks, n places, k entries of a rank, E[K] = n (1 - (1 - k/n)^P) entries of the sum at random supports
    s bytes of an entry (index and value), v of a value; h of a header

    gather               one latency        (P - 1) (h + k s)
    recursive_doubling   log2 P             sum over rounds t of (h + union of 2^t streams)
    split_gather         two                (P - 1) (h + k s / P)  +  (P - 1) (h + K s / P)
    dense_split_gather   P                  (P - 1) (h + k s / P)  +  (P - 1) n v / P, or fewer bits where quantised

A stream that would be no smaller sparse is sent dense, n v bytes. Bytes are exact where P divides n and k, and entries
are spread evenly over the parts; entries that lie close together make an owner of a split slower than this.

Where all ranks send to all at once, messages meet at the ports: the last receiver waits while P - 2 messages go to
others, and then for its own P - 1. So the path of such an exchange has 2 P - 3 messages, as on the links of
planning/network.py, which serve messages in the order in which they were handed over. Links that share their rate among
messages bring it nearer to P - 1.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from weft.planning.collective_cost import log2_ceil
from weft.planning.cost import CommunicationCost, Cost
from weft.specs.roles import assign_roles

__all__ = ["HEADER_BYTES", "INDEX_BYTES", "SPARSE_ALGORITHMS", "SparseAlgorithm", "Supports", "sparse_cost"]

SparseAlgorithm = Literal["gather", "recursive_doubling", "split_gather", "dense_split_gather"]
SPARSE_ALGORITHMS: tuple[SparseAlgorithm, ...] = get_args(SparseAlgorithm)

HEADER_BYTES = 8
INDEX_BYTES = 4

BISECTIONS = 60


@dataclass(frozen=True)
class Supports:
    """Where the entries lie: those of each rank as if drawn at random from `positions` of the places.

        positions = per_rank      identical: the sum has as many entries as each
        positions = length        random
        positions = infinity      disjoint

    Args:
        length: places of the vector.
        per_rank: entries of every rank.
        positions: that entries are drawn from; all places if not given.
        value_bytes: of a value.
    """

    length: int
    per_rank: float
    positions: float | None = None
    value_bytes: int = 4

    def union(self, num_ranks: int) -> float:
        """Entries of the sum over so many ranks, on average.

        >>> Supports(1000, 100).union(2), Supports(1000, 100, 100).union(2), Supports(1000, 100, math.inf).union(2)
        (190.0, 100.0, 200.0)
        """
        positions = self.length if self.positions is None else self.positions
        if math.isinf(positions):
            return float(min(num_ranks * self.per_rank, self.length))
        if self.per_rank >= positions:
            return float(self.per_rank)
        return round(-positions * math.expm1(num_ranks * math.log1p(-self.per_rank / positions)), 6)

    @property
    def entry_bytes(self) -> int:
        return INDEX_BYTES + self.value_bytes

    def fills_up(self, num_entries: float, num_parts: int = 1) -> bool:
        """Whether so many entries, of one of so many parts of the vector, are no smaller than the dense part."""
        return num_entries * self.entry_bytes >= self.length / num_parts * self.value_bytes

    @staticmethod
    def measured(length: int, per_rank: float, total: float, num_ranks: int, value_bytes: int = 4) -> "Supports":
        """Of ranks whose sum had `total` entries, for example in the last step.

        >>> round(Supports.measured(1000, 100, 190, 2).union(2), 3)
        190.0
        """
        if total >= num_ranks * per_rank:
            return Supports(length, per_rank, math.inf, value_bytes)
        low, high = per_rank, max(per_rank * num_ranks, 1.0)
        while Supports(length, per_rank, high).union(num_ranks) < total and high < length * length:
            high *= 2
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            is_low = Supports(length, per_rank, middle).union(num_ranks) < total
            low, high = (middle, high) if is_low else (low, middle)
        return Supports(length, per_rank, high, value_bytes)


def sparse_cost(
    algorithm: SparseAlgorithm, size: int, supports: Supports, gathered_bytes: float | None = None
) -> CommunicationCost:
    """Cost of a sparse sum among so many ranks.

    Args:
        algorithm: see above.
        size: how many ranks there are.
        supports: of their entries.
        gathered_bytes: of a value in the dense phase of `dense_split_gather`, where it is quantised.
    """
    if size == 1:
        return _costs([Cost()])
    if algorithm == "gather":
        body = _body(supports, supports.per_rank)
        return _costs([_exchange(size, body).plus(Cost(bytes_reduced=(size - 1) * body))] * size)
    if algorithm == "recursive_doubling":
        return _recursive_doubling(size, supports)
    return _split(algorithm, size, supports, gathered_bytes)


def _body(supports: Supports, num_entries: float, num_parts: int = 1, *, is_dense: bool = False) -> float:
    """Bytes of a part of a stream that was put in its smaller form, or that a sum has made dense."""
    if is_dense or supports.fills_up(num_entries, num_parts):
        return supports.length / num_parts * supports.value_bytes
    return num_entries * supports.entry_bytes


def _split(
    algorithm: SparseAlgorithm, size: int, supports: Supports, gathered_bytes: float | None
) -> CommunicationCost:
    others, own = size - 1, supports.per_rank / size
    part = _body(supports, own, size)
    split = _exchange(size, part).plus(Cost(bytes_reduced=others * part))
    if algorithm == "split_gather":
        is_dense = supports.fills_up(supports.union(others) / size + own, size)
        total = _body(supports, supports.union(size) / size, size, is_dense=is_dense)
        return _costs([split.plus(_exchange(size, total))] * size)
    value_bytes = supports.value_bytes if gathered_bytes is None else gathered_bytes
    gathered = others * supports.length / size * value_bytes
    return _costs([split.plus(Cost(gathered, others, gathered))] * size)


def _exchange(size: int, body: float) -> Cost:
    """Of messages of so many bytes from all ranks to all others at once."""
    message = HEADER_BYTES + body
    return Cost((size - 1) * message, 1, (2 * size - 3) * message)


def _recursive_doubling(size: int, supports: Supports) -> CommunicationCost:
    """Place by place, because those into which another rank has folded hold the sum of two from the start."""
    power = 1 << (size.bit_length() - 1)
    num_folded = size - power
    first = _Sum(1, supports.fills_up(supports.per_rank))
    folded = first.plus(first, supports)
    sums = [folded] * num_folded + [first] * (power - num_folded)
    sent, reduced, path = [0.0] * power, [0.0] * power, 0.0
    fold = first.bytes(supports)
    # When each place has its sum, in latencies: one whose peer was ready before does not wait for it.
    late = [1] * num_folded + [0] * (power - num_folded)
    for step in range(log2_ceil(power)):
        bodies = [held.bytes(supports) for held in sums]
        path += HEADER_BYTES + max(bodies)
        sent = [total + HEADER_BYTES + body for total, body in zip(sent, bodies, strict=True)]
        reduced = [total + bodies[place ^ 1 << step] for place, total in enumerate(reduced)]
        late = [max(moment, late[place ^ 1 << step] + 1) for place, moment in enumerate(late)]
        sums = [held.plus(sums[place ^ 1 << step], supports) for place, held in enumerate(sums)]
    unfold = sums[0].bytes(supports)
    rounds = max(moment + (place < num_folded) for place, moment in enumerate(late))
    path += 2 * HEADER_BYTES + fold + unfold if num_folded else 0
    costs = []
    for place in range(power):
        is_host = place < num_folded
        extra = HEADER_BYTES + unfold if is_host else 0.0
        costs.append(Cost(sent[place] + extra, rounds, path, reduced[place] + (fold if is_host else 0.0)))
        costs += [Cost(HEADER_BYTES + fold, rounds, path)] if is_host else []
    return _costs(costs)


@dataclass(frozen=True)
class _Sum:
    """The sum over so many ranks, and whether it has become dense on the way."""

    num_ranks: int
    is_dense: bool

    def plus(self, other: "_Sum", supports: Supports) -> "_Sum":
        bound = supports.union(self.num_ranks) + supports.union(other.num_ranks)
        is_dense = self.is_dense or other.is_dense or supports.fills_up(bound)
        return _Sum(self.num_ranks + other.num_ranks, is_dense)

    def bytes(self, supports: Supports) -> float:
        return _body(supports, supports.union(self.num_ranks), is_dense=self.is_dense)


def _costs(costs: list[Cost]) -> CommunicationCost:
    return CommunicationCost(tuple(costs), assign_roles(len(costs), "all_reduce"))
