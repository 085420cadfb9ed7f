"""Schedules of the collectives, by rank and size.

An all-reduce makes the copies of a message, everywhere, their sum. Each algorithm keeps a fixed order of sums (told
with each phase), and the finished sum of a part is computed by one rank and copied to the others, or by a pair with the
same two operands: every rank ends with the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from weft.distributed.collectives.moves import Action, Move, Parts, Schedule, all_parts
from weft.distributed.collectives.phases import (
    doubling_all_gather,
    halving_reduce_scatter,
    pairwise_exchange,
    ring_all_gather,
    ring_reduce_scatter,
    tree_broadcast,
    tree_reduce,
)
from weft.distributed.group.calls import NeighbourGraph
from weft.planning.collective_cost import LevelAlgorithm, is_power_of_two, log2_ceil

__all__ = [
    "all_gather",
    "all_to_all",
    "barrier",
    "broadcast",
    "collect",
    "halving_doubling",
    "hierarchical",
    "hierarchical_parts",
    "neighbours",
    "reduce",
    "ring",
    "tree",
]

# A ring of 256 ranks holds 510 rounds for each of them: a cache of two such rings, and of all smaller ones.
CACHED = 512

Phase = Callable[[Sequence[int], int, Sequence[Parts]], Schedule]
"""From (ranks, position, parts)."""


@lru_cache(CACHED)
def ring(rank: int, size: int) -> Schedule:
    """Reduce-scatter around the ring, then all-gather around it; `size` parts. Bandwidth-optimal, 2(N-1) rounds."""
    ranks, parts = range(size), all_parts(size)
    return ring_reduce_scatter(ranks, rank, parts) + ring_all_gather(ranks, rank, parts)


@lru_cache(CACHED)
def tree(rank: int, size: int) -> Schedule:
    """Binomial tree up to rank 0 and down again; one part. Fewest rounds for tiny messages of any size."""
    depth = log2_ceil(size)
    up = tree_reduce(range(size), rank, (0, 1), depth=depth)
    return up + tree_broadcast(range(size), rank, (0, 1), depth=depth)


@lru_cache(CACHED)
def halving_doubling(rank: int, size: int) -> Schedule:
    """Rabenseifner's recursive halving and doubling among P ranks, the largest power of two; P parts.

    The ranks beyond it fold into a neighbour first and get the result from it last:

        size 6:   fold    0 <= 1   2 <= 3   4   5      places 0 1 2 3 are ranks 0 2 4 5
                  halve   0 <-> 4  2 <-> 5
                          0 <-> 2  4 <-> 5
                  double  the same backwards
                  unfold  0 => 1   2 => 3
    """
    power = 1 << (size.bit_length() - 1)
    num_folded = size - power
    whole = (0, power)
    ranks = [*range(0, 2 * num_folded, 2), *range(2 * num_folded, size)]
    if rank not in ranks:
        idle: Schedule = ((),) * (2 * log2_ceil(power))
        return ((Move(Action.SEND, rank - 1, whole),), *idle, (Move(Action.RECV, rank - 1, whole),))
    place = ranks.index(rank)
    parts = all_parts(power)
    core = halving_reduce_scatter(ranks, place, parts) + doubling_all_gather(ranks, place, parts)
    if num_folded == 0:
        return core
    if rank < 2 * num_folded:
        return ((Move(Action.REDUCE, rank + 1, whole),), *core, (Move(Action.SEND, rank + 1, whole),))
    return ((), *core, ())


@lru_cache(CACHED)
def hierarchical(rank: int, size: int, ranks_per_host: int, by: LevelAlgorithm = "ring") -> Schedule:
    """Two levels; `hierarchical_parts` parts. Only 2(H-1)/H of the message leaves or enters each of H hosts.

    hosts of L ranks each:   reduce-scatter inside a host                (L slices of H parts)
                             all-reduce of slice i among the i-th ranks of all hosts
                             all-gather inside a host
    a ragged last host:      tree to each host's first rank, ring among these, tree back

    Each level by ring, or, with `halving`, by halving and doubling where it is a power of two of ranks.
    """
    ranks_per_host = min(ranks_per_host, size)
    num_hosts = -(-size // ranks_per_host)
    host, place = divmod(rank, ranks_per_host)
    first = host * ranks_per_host
    inside = range(first, min(first + ranks_per_host, size))
    if size % ranks_per_host == 0:
        slices = [(i * num_hosts, (i + 1) * num_hosts) for i in range(ranks_per_host)]
        own = [(place * num_hosts + part, place * num_hosts + part + 1) for part in range(num_hosts)]
        across = range(place, size, ranks_per_host)
        scatter_inside, gather_inside = _level(ranks_per_host, by)
        scatter_across, gather_across = _level(num_hosts, by)
        return (
            *scatter_inside(inside, place, slices),
            *scatter_across(across, host, own),
            *gather_across(across, host, own),
            *gather_inside(inside, place, slices),
        )
    leaders, shares = range(0, size, ranks_per_host), all_parts(num_hosts)
    ring_of_leaders = ring_reduce_scatter(leaders, host, shares) + ring_all_gather(leaders, host, shares)
    depth = log2_ceil(ranks_per_host)
    return (
        *tree_reduce(inside, place, (0, num_hosts), depth=depth),
        *(ring_of_leaders if place == 0 else ((),) * (2 * (num_hosts - 1))),
        *tree_broadcast(inside, place, (0, num_hosts), depth=depth),
    )


def _level(size: int, by: LevelAlgorithm) -> tuple[Phase, Phase]:
    """Reduce-scatter and all-gather of one level."""
    if by == "halving" and is_power_of_two(size):
        return halving_reduce_scatter, doubling_all_gather
    return ring_reduce_scatter, ring_all_gather


def hierarchical_parts(size: int, ranks_per_host: int) -> int:
    """One part for each rank, or one for each host where the last is ragged."""
    ranks_per_host = min(ranks_per_host, size)
    return size if size % ranks_per_host == 0 else -(-size // ranks_per_host)


@lru_cache(CACHED)
def all_gather(rank: int, size: int) -> Schedule:
    """Around the ring; part r is rank r's."""
    return ring_all_gather(range(size), rank, all_parts(size))


@lru_cache(CACHED)
def all_to_all(rank: int, size: int) -> Schedule:
    """Pairwise: sends part j of the input to rank j, receives part i of the output from rank i."""
    return pairwise_exchange(range(size), rank, all_parts(size))


@lru_cache(CACHED)
def collect(rank: int, size: int) -> Schedule:
    """As all_to_all, by the parts of one message: this rank's own from each of the others."""
    return tuple((send, replace(recv, parts=(rank, rank + 1))) for send, recv in all_to_all(rank, size))


@lru_cache(CACHED)
def barrier(rank: int, size: int) -> Schedule:
    """Dissemination: in round k a token goes 2^k ranks on. After the last round every rank has heard of all others.

    round 0:   0 -> 1 -> 2 -> 3 -> 4 -> 0        round 1:   0 -> 2 -> 4 -> 1 -> 3 -> 0        round 2:   4 on
    """
    return tuple(
        (
            Move(Action.SEND, (rank + (1 << k)) % size, (0, 1)),
            Move(Action.RECV, (rank - (1 << k)) % size, (1, 2)),
        )
        for k in range(log2_ceil(size))
    )


@lru_cache(CACHED)
def neighbours(rank: int, graph: NeighbourGraph) -> Schedule:
    """One round: part 0 to all ranks that list this one, part i of the output from the i-th rank that it lists."""
    sends = (Move(Action.SEND, peer, (0, 1)) for peer, sources in enumerate(graph) if rank in sources)
    recvs = (Move(Action.RECV, source, (i, i + 1)) for i, source in enumerate(graph[rank]))
    return ((*sends, *recvs),)


@lru_cache(CACHED)
def broadcast(rank: int, size: int, root: int) -> Schedule:
    return tree_broadcast(_places(size, root), (rank - root) % size, (0, 1), depth=log2_ceil(size))


@lru_cache(CACHED)
def reduce(rank: int, size: int, root: int) -> Schedule:
    """Order of the sum: that of the tree over places, (x0 + x1) + (x2 + x3), ..."""
    return tree_reduce(_places(size, root), (rank - root) % size, (0, 1), depth=log2_ceil(size))


def _places(size: int, root: int) -> tuple[int, ...]:
    """Ranks counted from the root: place v is rank (root + v) mod size."""
    return tuple((root + place) % size for place in range(size))
