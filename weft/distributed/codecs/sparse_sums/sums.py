"""The sum of sparse vectors over the ranks of a group, by one of four algorithms."""

from collections.abc import Callable

from weft.distributed.codecs.sparse_sums.dense_split_gather import Quantiser, dense_split_gather
from weft.distributed.codecs.sparse_sums.direct import SparseReduction
from weft.distributed.codecs.sparse_sums.gather import gather
from weft.distributed.codecs.sparse_sums.recursive_doubling import recursive_doubling
from weft.distributed.codecs.sparse_sums.split_gather import split_gather
from weft.distributed.codecs.sparse_sums.stream import SparseStream
from weft.errors import UsageError
from weft.planning.sparse_cost import SparseAlgorithm

__all__ = ["sum_sparse"]

EXACT: dict[SparseAlgorithm, Callable[[int, int, SparseStream, int], SparseReduction]] = {
    "gather": gather,
    "recursive_doubling": recursive_doubling,
    "split_gather": split_gather,
}


def sum_sparse(
    rank: int,
    size: int,
    stream: SparseStream,
    by: SparseAlgorithm,
    *,
    quantiser: Quantiser | None = None,
    tag: int = 0,
) -> SparseReduction:
    """The sum over all ranks, of the same bits on all of them: a generator of calls, for `ReductionWork`.

    All ranks give the same length, type, algorithm, quantiser and tag.

    Args:
        rank: this one, of the group.
        size: how many ranks there are.
        stream: of this rank. It is not changed; the sum may share its memory where there is one rank.
        by: the algorithm; see `choose_algorithm`.
        quantiser: of the dense phase of `dense_split_gather`.
        tag: different ones for sums that are under way at once in one group. Its messages have the tags 2 tag and
            2 tag + 1.

    Raises:
        UsageError: a quantiser is given to an algorithm that has no dense phase.
        EncodingError: what came from another rank is no such stream.
    """
    if by == "dense_split_gather":
        return dense_split_gather(rank, size, stream.compact(), 2 * tag, quantiser)
    if quantiser is not None:
        raise UsageError(f"nothing is quantised here (by: {by}); use by=dense_split_gather, or no quantiser")
    return EXACT[by](rank, size, stream.compact(), 2 * tag)
