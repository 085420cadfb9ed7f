"""All streams to all ranks, each of which adds them up: the baseline.

    rank 0   x0 ==> 1, 2, 3     has x0 x1 x2 x3:  ((x0 + x1) + x2) + x3
    rank 1   x1 ==> 2, 3, 0     has x0 x1 x2 x3:  the same
    ...

One latency and (P - 1) k entries: for few ranks, or supports so small that latency is all that counts.
"""

from weft.distributed.codecs.sparse_sums.direct import SparseReduction, exchange_streams, peers_after
from weft.distributed.codecs.sparse_sums.stream import SparseStream, add_up

__all__ = ["gather"]


def gather(rank: int, size: int, stream: SparseStream, tag: int) -> SparseReduction:
    """The sum over all ranks, in their order.

    Args:
        rank: this one, of the group.
        size: how many ranks there are.
        stream: of this rank.
        tag: of the messages.
    """
    peers = peers_after(rank, size)
    outgoing, lengths = dict.fromkeys(peers, stream), dict.fromkeys(peers, stream.length)
    streams = yield from exchange_streams(outgoing, lengths, stream.values, tag)
    streams[rank] = stream
    return add_up(streams[source] for source in range(size))
