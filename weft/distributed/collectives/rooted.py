"""Schedules with a root: broadcast, reduce, gather and scatter by binomial tree.

Places are counted from the root: place v is rank (root + v) mod size. The subtree below a place is a run of places, so
gather and scatter move runs of parts of a buffer that is kept in the order of places.

    gather, 6 places     round 0:  0 <- 1     2 <- 3     4 <- 5      one part each
                         round 1:  0 <- 2(3)             4           two parts
                         round 2:  0 <- 4(5)                         two parts, for there is no place 6 or 7
"""

from functools import lru_cache

from weft.distributed.collectives import phases
from weft.distributed.collectives.all_reduce import CACHED
from weft.distributed.collectives.schedule import Action, Move, Schedule
from weft.planning.collective_cost import log2_ceil

__all__ = ["broadcast", "gather", "places", "reduce", "scatter"]


def places(size: int, root: int) -> tuple[int, ...]:
    """Ranks in the order of their places.

    >>> places(4, root=2)
    (2, 3, 0, 1)
    """
    return tuple((root + place) % size for place in range(size))


@lru_cache(CACHED)
def broadcast(rank: int, size: int, root: int) -> Schedule:
    return phases.tree_broadcast(places(size, root), (rank - root) % size, (0, 1), depth=log2_ceil(size))


@lru_cache(CACHED)
def reduce(rank: int, size: int, root: int) -> Schedule:
    """Order of the sum: that of the tree over places, (x0 + x1) + (x2 + x3), ..."""
    return phases.tree_reduce(places(size, root), (rank - root) % size, (0, 1), depth=log2_ceil(size))


@lru_cache(CACHED)
def gather(rank: int, size: int, root: int) -> Schedule:
    """Part v of the buffer belongs to place v."""
    ranks, place = places(size, root), (rank - root) % size
    rounds: list[tuple[Move, ...]] = []
    for bit in (1 << k for k in range(log2_ceil(size))):
        if place % (2 * bit) == bit:
            rounds.append((Move(Action.SEND, ranks[place - bit], (place, min(place + bit, size))),))
        elif place % (2 * bit) == 0 and place + bit < size:
            below = (place + bit, min(place + 2 * bit, size))
            rounds.append((Move(Action.RECV, ranks[place + bit], below),))
        else:
            rounds.append(())
    return tuple(rounds)


@lru_cache(CACHED)
def scatter(rank: int, size: int, root: int) -> Schedule:
    """The gather played backwards."""
    turned = {Action.SEND: Action.RECV, Action.RECV: Action.SEND}
    return tuple(
        tuple(Move(turned[move.action], move.peer, move.parts) for move in moves)
        for moves in reversed(gather(rank, size, root))
    )
