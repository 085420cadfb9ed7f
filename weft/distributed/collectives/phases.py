"""The phases that collectives are made of: schedules among any ranks, for any parts.

`ranks` lists who takes part, `position` is this rank's place in it, and `parts[j]` is what place j is responsible for.
"""

from collections.abc import Sequence

from weft.distributed.collectives.moves import Action, Move, Parts, Schedule

__all__ = [
    "doubling_all_gather",
    "halving_reduce_scatter",
    "pairwise_exchange",
    "ring_all_gather",
    "ring_reduce_scatter",
    "tree_broadcast",
    "tree_reduce",
]


def ring_reduce_scatter(ranks: Sequence[int], position: int, parts: Sequence[Parts]) -> Schedule:
    """Each part walks once around the ring, growing, and ends whole at its own place.

        part 0 of 4:   1 --> 2 --> 3 --> 0      ((x1 + x2) + x3) + x0

    Order of the sum of part j: from place j + 1 around the ring to place j.
    """
    size = len(ranks)
    left, right = ranks[position - 1], ranks[(position + 1) % size]
    return tuple(
        (
            Move(Action.SEND, right, parts[(position - step - 1) % size]),
            Move(Action.REDUCE, left, parts[(position - step - 2) % size]),
        )
        for step in range(size - 1)
    )


def ring_all_gather(ranks: Sequence[int], position: int, parts: Sequence[Parts]) -> Schedule:
    """Each part walks once around the ring from its own place.

    part 0 of 4:   0 --> 1 --> 2 --> 3
    """
    size = len(ranks)
    left, right = ranks[position - 1], ranks[(position + 1) % size]
    return tuple(
        (
            Move(Action.SEND, right, parts[(position - step) % size]),
            Move(Action.RECV, left, parts[(position - step - 1) % size]),
        )
        for step in range(size - 1)
    )


def pairwise_exchange(ranks: Sequence[int], position: int, parts: Sequence[Parts]) -> Schedule:
    """Part j goes straight to place j, and part i comes from place i; in round k from k places away.

    round 1:   0 -> 1 -> 2 -> 3 -> 0        round 2:   0 <-> 2, 1 <-> 3        round 3:   0 <- 1 <- 2 <- 3 <- 0
    """
    size = len(ranks)
    return tuple(
        (
            Move(Action.SEND, ranks[(position + step) % size], parts[(position + step) % size]),
            Move(Action.RECV, ranks[(position - step) % size], parts[(position - step) % size]),
        )
        for step in range(1, size)
    )


def halving_reduce_scatter(ranks: Sequence[int], position: int, parts: Sequence[Parts]) -> Schedule:
    """Recursive halving, for a power of two: swap half of what is left with a place half as far away, and reduce. The
    parts lie one behind the other.

        round 1:   0 <-> 4   1 <-> 5   2 <-> 6   3 <-> 7      half of the message
        round 2:   0 <-> 2   1 <-> 3   4 <-> 6   5 <-> 7      a quarter
        round 3:   0 <-> 1   2 <-> 3   4 <-> 5   6 <-> 7      an eighth

    Order of the sum: a balanced tree over the bits of the place, highest first: (x0 + x4) + (x2 + x6), and so on.
    """
    rounds = []
    first, last = 0, len(ranks)
    while last - first > 1:
        distance = (last - first) // 2
        lower, upper = (first, first + distance), (first + distance, last)
        keep, give = (upper, lower) if position & distance else (lower, upper)
        peer = ranks[position ^ distance]
        rounds.append((Move(Action.SEND, peer, _span(parts, *give)), Move(Action.REDUCE, peer, _span(parts, *keep))))
        first, last = keep
    return tuple(rounds)


def _span(parts: Sequence[Parts], first: int, last: int) -> Parts:
    """The parts of places first to last, last excluded, as one."""
    return parts[first][0], parts[last - 1][1]


def doubling_all_gather(ranks: Sequence[int], position: int, parts: Sequence[Parts]) -> Schedule:
    """Recursive doubling, for a power of two: the halving played backwards, each round with twice as many parts."""
    backwards = reversed(halving_reduce_scatter(ranks, position, parts))
    return tuple(
        (Move(Action.SEND, keep.peer, keep.parts), Move(Action.RECV, give.peer, give.parts)) for give, keep in backwards
    )


def tree_reduce(ranks: Sequence[int], position: int, parts: Parts, *, depth: int) -> Schedule:
    """Binomial tree to place 0: in round k, places that differ in bit k alone meet; the upper one is then done.

        round 0:   0 <- 1   2 <- 3   4 <- 5
        round 1:   0 <------2        4
        round 2:   0 <---------------4

    Order of the sum: neighbours first, (x0 + x1) + (x2 + x3), and so on. `depth` may exceed what these ranks need, so
    that trees of different size stay in step.
    """
    rounds: list[tuple[Move, ...]] = []
    for bit in (1 << k for k in range(depth)):
        if position % (2 * bit) == bit:
            rounds.append((Move(Action.SEND, ranks[position - bit], parts),))
        elif position % (2 * bit) == 0 and position + bit < len(ranks):
            rounds.append((Move(Action.REDUCE, ranks[position + bit], parts),))
        else:
            rounds.append(())
    return tuple(rounds)


def tree_broadcast(ranks: Sequence[int], position: int, parts: Parts, *, depth: int) -> Schedule:
    """Binomial tree from place 0: the reduction played backwards."""
    turned = {Action.SEND: Action.RECV, Action.REDUCE: Action.SEND}
    return tuple(
        tuple(Move(turned[move.action], move.peer, move.parts) for move in moves)
        for moves in reversed(tree_reduce(ranks, position, parts, depth=depth))
    )
