"""Split and sparse all-gather: every rank adds up one part of the index range (SSAR_Split_allgather).

                 0        n/3      2n/3       n
    rank 0       |  x0,0  |  x0,1  |  x0,2  |       part j goes straight to rank j
    rank 1       |  x1,0  |  x1,1  |  x1,2  |
    rank 2       |  x2,0  |  x2,1  |  x2,2  |
                     |        |        |
    owner        rank 0   rank 1   rank 2           adds (x0,j + x1,j) + x2,j: the order of ranks, not of arrival
                 |   y0   |   y1   |   y2   |       and sends its sum straight to all others

Two latencies. An entry travels once to its owner, and once more for each other rank as a part of the sum. The parts are
equal in places, not in entries: entries that lie close together make one owner do the work of all.
"""

from collections.abc import Generator, Sequence

from weft.distributed.codecs.sparse_sums.direct import SparseReduction, exchange_streams, peers_after
from weft.distributed.codecs.sparse_sums.stream import SparseStream, add_up, cut, join
from weft.distributed.collectives.moves import part_bounds
from weft.distributed.group.calls import Call

__all__ = ["collect_parts", "split_gather"]


def split_gather(rank: int, size: int, stream: SparseStream, tag: int) -> SparseReduction:
    """The sum over all ranks, in their order.

    Args:
        rank: this one, of the group.
        size: how many ranks there are.
        stream: of this rank.
        tag: of the messages.
    """
    bounds, peers = part_bounds(stream.length, size), peers_after(rank, size)
    own = add_up((yield from collect_parts(rank, stream, bounds, tag)))
    lengths = {peer: bounds[peer + 1] - bounds[peer] for peer in peers}
    sums = yield from exchange_streams(dict.fromkeys(peers, own), lengths, stream.values, tag)
    sums[rank] = own
    return join([sums[source] for source in range(size)], bounds)


def collect_parts(
    rank: int, stream: SparseStream, bounds: Sequence[int], tag: int
) -> Generator[Call | tuple[Call, ...], None, list[SparseStream]]:
    """The part of which this rank is the owner, of every rank, in their order.

    Args:
        rank: this one, of the group.
        stream: of this rank.
        bounds: of the parts of the index range.
        tag: of the messages.
    """
    size = len(bounds) - 1
    parts, peers = cut(stream, bounds), peers_after(rank, size)
    outgoing, lengths = {peer: parts[peer] for peer in peers}, dict.fromkeys(peers, parts[rank].length)
    collected = yield from exchange_streams(outgoing, lengths, stream.values, tag)
    collected[rank] = parts[rank]
    return [collected[source] for source in range(size)]
