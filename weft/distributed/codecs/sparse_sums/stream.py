"""Streams of SparCML: vectors that are sparse until their sum has filled up, and dense from then on.

    sparse   indices  | 3 | 17 | 40 |        int32, ascending, each once
             values   | a |  b |  c |        float32 or float64
    dense    values   | . | . | . | a | ...  one for each of `length` places

Two sparse ones of h1 and h2 entries have a dense sum as soon as it might be the smaller form,

    (h1 + h2) * (bytes of an index + bytes of a value) >= length * bytes of a value

where h1 + h2 stands for the entries of the sum, which nobody has counted yet.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.kernels import merge, scatter_add

__all__ = ["INDEX_TYPE", "SparseStream", "add", "add_into", "add_up", "cut", "join"]

INDEX_TYPE = torch.int32


@final
@dataclass(frozen=True, eq=False)
class SparseStream:
    """A vector. Its tensors are never written to by sums.

    Args:
        length: of the vector.
        values: of the entries, or of all places.
        indices: of the entries; None where it is dense. A full vector may be in either form, so no count tells.
    """

    length: int
    values: Tensor
    indices: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.values.dim() == 1, "values are flat"
        assert len(self.values) == (self.length if self.indices is None else len(self.indices)), "a value for each"
        assert self.indices is None or self.indices.dtype == INDEX_TYPE, "indices are int32"

    @property
    def is_dense(self) -> bool:
        return self.indices is None

    @property
    def num_entries(self) -> int:
        """That are sent: of a dense one all places."""
        return len(self.values)

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def to_dense(self) -> Tensor:
        """The vector itself; the stream's own memory where it is dense."""
        if self.indices is None:
            return self.values
        dense = self.values.new_zeros(self.length)
        dense[self.indices] = self.values
        return dense

    def compact(self) -> "SparseStream":
        """In the smaller form."""
        return self.as_dense() if self.indices is not None and _fills_up(self, len(self.indices)) else self

    def as_dense(self) -> "SparseStream":
        return SparseStream(self.length, self.to_dense())


def add(one: SparseStream, other: SparseStream) -> SparseStream:
    """The sum, of the same bits whichever comes first."""
    if one.indices is not None and other.indices is not None:
        if not _fills_up(one, one.num_entries + other.num_entries):
            indices, values = merge(one.indices, one.values, other.indices, other.values)
            return SparseStream(one.length, values, indices)
        return _add_to(one.as_dense(), other)
    if one.is_dense:
        return _add_to(SparseStream(one.length, one.values.clone()), other)
    return add(other, one)


def add_up(streams: Iterable[SparseStream]) -> SparseStream:
    """The sum in this order, ((x0 + x1) + x2) + ...; sparse as long as every sum on the way was."""
    first, *rest = streams
    return reduce(add, rest, first)


def add_into(dense: Tensor, stream: SparseStream) -> None:
    """Add a stream to a vector, in place."""
    if stream.indices is None:
        dense.add_(stream.values)
    else:
        scatter_add(dense, stream.indices, stream.values)


def cut(stream: SparseStream, bounds: Sequence[int]) -> list[SparseStream]:
    """The parts between these places, each in the smaller form, its indices counted from where it begins.

    >>> whole = SparseStream(9, torch.tensor([1.0, 2.0]), torch.tensor([1, 8], dtype=INDEX_TYPE))
    >>> [part.indices for part in cut(whole, (0, 4, 9))]
    [tensor([1], dtype=torch.int32), tensor([4], dtype=torch.int32)]
    """
    if stream.indices is None:
        return [SparseStream(end - begin, stream.values[begin:end]) for begin, end in pairwise(bounds)]
    places = torch.tensor(tuple(bounds), dtype=INDEX_TYPE, device=stream.indices.device)
    ends = torch.searchsorted(stream.indices, places).tolist()
    parts = []
    for (begin, end), (first, last) in zip(pairwise(bounds), pairwise(ends), strict=True):
        part = SparseStream(end - begin, stream.values[first:last], stream.indices[first:last] - begin)
        parts.append(part.compact())
    return parts


def join(parts: Sequence[SparseStream], bounds: Sequence[int]) -> SparseStream:
    """The vector of which these are the parts; dense where one of them is."""
    length = bounds[-1]
    sparse = [part.indices + begin for part, begin in zip(parts, bounds, strict=False) if part.indices is not None]
    if len(sparse) == len(parts):
        return SparseStream(length, torch.cat([part.values for part in parts]), torch.cat(sparse))
    return SparseStream(length, torch.cat([part.to_dense() for part in parts]))


def _add_to(total: SparseStream, other: SparseStream) -> SparseStream:
    """The same stream, dense and nobody else's, with the other added."""
    add_into(total.values, other)
    return total


def _fills_up(stream: SparseStream, num_entries: int) -> bool:
    """Whether a stream like this is no larger dense than with so many entries."""
    value_bytes = stream.values.element_size()
    return num_entries * (INDEX_TYPE.itemsize + value_bytes) >= stream.length * value_bytes
