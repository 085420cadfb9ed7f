"""Split and dense all-gather: the owner's part is dense from the start (DSAR_Split_allgather).

                 0        n/3      2n/3       n
    split        part j of every stream straight to rank j, as in split_gather
    owner        0 + x0,j + x1,j + x2,j            dense, in the order of ranks
    gather       |   y0   |   y1   |   y2   |      dense, whose lengths all ranks know: no index, no header
    quantised    |  Q(y0) |  Q(y1) |  Q(y2) |      decoded by every rank, the owner of the part too

For sums that fill up. An exact dense phase gains a factor of two at most over a dense all-reduce, a quantised one more.
The owner has the exact part in its hands; if it kept that, ranks would drift apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weft.distributed.codecs.sparse_sums.direct import SparseReduction
from weft.distributed.codecs.sparse_sums.split_gather import collect_parts
from weft.distributed.codecs.sparse_sums.stream import SparseStream, add_into
from weft.distributed.collectives.moves import part_bounds
from weft.distributed.group.calls import AllGather

__all__ = ["Quantiser", "dense_split_gather"]


@dataclass(frozen=True)
class Quantiser:
    """How dense parts are sent in fewer bits, of QSGD for example.

    Args:
        encode: from a part to flat bytes (uint8).
        decode: from those bytes into a part of that length, written to the tensor that is given.
        num_bytes: that `encode` makes of so many values: all ranks know it before.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], object]
    num_bytes: Callable[[int], int]


def dense_split_gather(
    rank: int, size: int, stream: SparseStream, tag: int, quantiser: Quantiser | None = None
) -> SparseReduction:
    """The sum over all ranks, in their order, dense.

    Args:
        rank: this one, of the group.
        size: how many ranks there are.
        stream: of this rank.
        tag: of the messages.
        quantiser: of the parts that are gathered; None to send them as they are.
    """
    bounds = part_bounds(stream.length, size)
    total = stream.values.new_zeros(stream.length)
    own = total[bounds[rank] : bounds[rank + 1]]
    for part in (yield from collect_parts(rank, stream, bounds, tag)):
        add_into(own, part)
    lengths = tuple(end - begin for begin, end in pairwise(bounds))
    if quantiser is None:
        yield AllGather(total, own, lengths)
        return SparseStream(stream.length, total)
    sizes = tuple(map(quantiser.num_bytes, lengths))
    gathered = total.new_empty(sum(sizes), dtype=torch.uint8)
    yield AllGather(gathered, quantiser.encode(own), sizes)
    for part, values in zip(gathered.split(sizes), total.split(lengths), strict=True):
        quantiser.decode(part, values)
    return SparseStream(stream.length, total)
