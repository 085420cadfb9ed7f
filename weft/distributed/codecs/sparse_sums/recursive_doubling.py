"""Recursive doubling: in every round pairs swap all that they have added up (SSAR_Recursive_double).

    size 6:   fold     0 <= 1   2 <= 3   4   5      places 0 1 2 3 are ranks 0 2 4 5
              round 0  0 <-> 2  4 <-> 5
              round 1  0 <-> 4  2 <-> 5
              unfold   0 => 1   2 => 3

Both of a pair add the same two streams, and a sum of two has the same bits either way; so all ranks end with the same
bits, in the order of the tree, (x0 + x1) + (x2 + x3). Log P latencies: for supports that overlap, of many ranks.
"""

from weft.distributed.codecs.sparse_sums.direct import SparseReduction, exchange_streams
from weft.distributed.codecs.sparse_sums.stream import SparseStream, add

__all__ = ["recursive_doubling"]


def recursive_doubling(rank: int, size: int, stream: SparseStream, tag: int) -> SparseReduction:
    """The sum over all ranks, in the order of the tree.

    Args:
        rank: this one, of the group.
        size: how many ranks there are.
        stream: of this rank.
        tag: of the messages.
    """
    power = 1 << (size.bit_length() - 1)
    num_folded = size - power
    ranks = [*range(0, 2 * num_folded, 2), *range(2 * num_folded, size)]
    length, like = stream.length, stream.values
    if rank not in ranks:
        yield from exchange_streams({rank - 1: stream}, {}, like, tag)
        received = yield from exchange_streams({}, {rank - 1: length}, like, tag)
        return received[rank - 1]
    total, is_host = stream, rank < 2 * num_folded
    if is_host:
        received = yield from exchange_streams({}, {rank + 1: length}, like, tag)
        total = add(total, received[rank + 1])
    place, distance = ranks.index(rank), 1
    while distance < power:
        peer = ranks[place ^ distance]
        received = yield from exchange_streams({peer: total}, {peer: length}, like, tag)
        total = add(total, received[peer])
        distance *= 2
    if is_host:
        yield from exchange_streams({rank + 1: total}, {}, like, tag)
    return total
