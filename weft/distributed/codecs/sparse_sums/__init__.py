"""Sparse all-reduce (SparCML): sums of vectors of which each rank has few entries, of the same bits on all ranks."""

from weft.distributed.codecs.sparse_sums.choice import choose_algorithm, forecast_sums
from weft.distributed.codecs.sparse_sums.dense_split_gather import Quantiser
from weft.distributed.codecs.sparse_sums.direct import SparseReduction
from weft.distributed.codecs.sparse_sums.stream import INDEX_TYPE, SparseStream
from weft.distributed.codecs.sparse_sums.sums import sum_sparse
from weft.distributed.codecs.sparse_sums.wire import HEADER_BYTES, read_stream, write_stream
from weft.planning.sparse_cost import SPARSE_ALGORITHMS, SparseAlgorithm, Supports

__all__ = [
    "HEADER_BYTES",
    "INDEX_TYPE",
    "SPARSE_ALGORITHMS",
    "Quantiser",
    "SparseAlgorithm",
    "SparseReduction",
    "SparseStream",
    "Supports",
    "choose_algorithm",
    "forecast_sums",
    "read_stream",
    "sum_sparse",
    "write_stream",
]
