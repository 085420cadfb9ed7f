"""Schedules in which all ranks are equal: all-gather, all-to-all, barrier, and neighbours on a graph."""

from functools import lru_cache

from weft.distributed.collectives import phases
from weft.distributed.collectives.all_reduce import CACHED
from weft.distributed.collectives.schedule import Action, Move, Schedule, all_parts
from weft.distributed.group.calls import NeighbourGraph
from weft.planning.collective_cost import log2_ceil

__all__ = ["all_gather", "all_to_all", "barrier", "neighbours"]


@lru_cache(CACHED)
def all_gather(rank: int, size: int) -> Schedule:
    """Around the ring; part r is rank r's."""
    return phases.ring_all_gather(range(size), rank, all_parts(size))


@lru_cache(CACHED)
def all_to_all(rank: int, size: int) -> Schedule:
    """Pairwise: sends part j of the input to rank j, receives part i of the output from rank i."""
    return phases.pairwise_exchange(range(size), rank, all_parts(size))


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
