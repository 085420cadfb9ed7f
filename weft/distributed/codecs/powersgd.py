"""PowerSGD: two thin factors of every matrix, by one step of power iteration (Vogels et al., 2019).

    M = kept + g,  n x m                                   on every rank
    P = M Q,       n x r     added up, then orthogonal     first message; Q is that of the step before (warm start)
    Q = M' P,      m x r     added up                      second message
    sum  = P Q'    the same bits on all ranks
    kept = M - P Q_own'                                    what this rank's own factor leaves out

Vectors, and matrices that are smaller than their factors, travel as they are beside P. Transports add up both messages.

Ranks make P orthogonal and multiply the factors each for itself, so both are done in an order that no number of threads
changes. A column of Q that is 0, because M had no more than the other columns, or nothing at all, would be 0 for ever:
it begins again from its first draw.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import AbstractCodec, Kept, Reduction, malformed
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.packing import Bucket, Empty
from weft.distributed.codecs.residuals import Residuals, working_type
from weft.distributed.group.calls import AllReduce, ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.planning.codec_cost import CodecCost, codec_cost, is_low_rank
from weft.specs.plan import Choice

__all__ = ["PowerSgdCodec", "make_powersgd"]

ALL_RANKS = 0


@dataclass(frozen=True)
class _Layout:
    """Which pieces of a bucket are matrices with factors, and which travel as they are."""

    bucket: Bucket
    rank: int

    @cached_property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns, by name."""
        shapes = zip(self.bucket.names, self.bucket.shapes, strict=True)
        return {
            name: (shape[0], math.prod(shape[1:])) for name, shape in shapes if is_low_rank(tuple(shape), self.rank)
        }

    @cached_property
    def first_sizes(self) -> tuple[int, ...]:
        """Of the first message: for each piece its left factor, or all of it."""
        sizes = zip(self.bucket.names, self.bucket.sizes, strict=True)
        return tuple(self.matrices[name][0] * self.rank if name in self.matrices else size for name, size in sizes)

    @cached_property
    def second_sizes(self) -> tuple[int, ...]:
        return tuple(columns * self.rank for _, columns in self.matrices.values())

    def lefts(self, first: Tensor) -> dict[str, Tensor]:
        parts = dict(zip(self.bucket.names, first.split(self.first_sizes), strict=True))
        return {name: parts[name].view(rows, self.rank) for name, (rows, _) in self.matrices.items()}

    def rights(self, second: Tensor) -> dict[str, Tensor]:
        parts = zip(self.matrices.items(), second.split(self.second_sizes), strict=True)
        return {name: part.view(columns, self.rank) for (name, (_, columns)), part in parts}

    def whole(self, first: Tensor) -> dict[str, Tensor]:
        """Pieces that travel as they are."""
        parts = zip(self.bucket.names, first.split(self.first_sizes), strict=True)
        return {name: part for name, part in parts if name not in self.matrices}


@final
class PowerSgdCodec(AbstractCodec):
    """`compress=powersgd(rank)`, for ranks in a group.

    Args:
        rank: columns of the factors.
    """

    def __init__(self, rank: int = 4) -> None:
        self._choice = Choice("powersgd", (("rank", rank),))
        self._rank = rank
        self._residuals = Residuals()
        self._rights: dict[str, Tensor] = {}  # of the last step, the same on all ranks

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return True

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor:
        return empty((sum(_Layout(bucket, self._rank).first_sizes),), working_type(bucket.dtype))

    @torch.no_grad()
    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        kept = self._residuals.beside(bucket, message.device)
        kernels.add(kept, message.detach().reshape(-1).to(kept.dtype), scale)
        layout, pieces = _Layout(bucket, self._rank), bucket.unpack(kept)
        first = kept.new_empty(sum(layout.first_sizes)) if out is None else out
        for name, left in layout.lefts(first).items():
            matrix = pieces[name].view(layout.matrices[name])
            torch.mm(matrix, self._right(name, bucket, matrix), out=left)
        for name, part in layout.whole(first).items():
            part.copy_(pieces[name].reshape(-1))
            pieces[name].zero_()
        return first

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        layout = _Layout(bucket, self._rank)
        kept = self._residuals.beside(bucket, sent.device)
        yield AllReduce(sent)
        second = kept.new_empty(sum(layout.second_sizes))
        if layout.matrices:
            self._project(layout, kept, sent, second)
            yield AllReduce(second)
        if not bool(sent.isfinite().all() and second.isfinite().all()):  # on all ranks alike
            self._residuals.drop_unfit(bucket)
        total = self._multiply(layout, sent, second)
        if op == "mean":
            total.div_(group.size)
        return total.to(bucket.dtype) if out is None else out.copy_(total.view(out.shape))

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        """One factor alone says nothing."""
        raise malformed(bucket, sent)

    def is_waiting(self, name: str) -> bool:
        return self._residuals.is_waiting(name)

    def memory(self) -> Mapping[str, Kept]:
        rights = {f"factor/{name}": Kept(right, "global") for name, right in self._rights.items()}
        return self._residuals.as_memory("residual/") | rights

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._residuals.restore_from(memory, "residual/")
        self._rights = {k.removeprefix("factor/"): v for k, v in memory.items() if k.startswith("factor/")}

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize, bucket.shapes)

    def _right(self, name: str, bucket: Bucket, matrix: Tensor) -> Tensor:
        """The right factor of the step before; at first, and where that says nothing, a draw that all ranks make
        alike."""
        right = self._rights.get(name)
        if right is not None and right.shape == (matrix.shape[1], self._rank):
            says_something = right.isfinite().all(0) & right.any(0)
            if bool(says_something.all()):
                return right
        else:
            right, says_something = None, torch.zeros(self._rank, dtype=torch.bool, device=matrix.device)
        piece = bucket.pieces[bucket.names.index(name)]
        key = MessageCounter.key(Bucket((piece,), (tuple(matrix.shape),), bucket.dtype), 0, ALL_RANKS)
        draws = kernels.uniform(key, matrix.shape[1] * self._rank, matrix.device)
        drawn = (2 * draws - 1).view(-1, self._rank).to(matrix.dtype)
        right = self._rights[name] = drawn if right is None else torch.where(says_something, right, drawn)
        return right

    @torch.no_grad()
    def _project(self, layout: _Layout, kept: Tensor, first: Tensor, second: Tensor) -> None:
        """From the sum of left factors to this rank's right ones, and what these leave out."""
        pieces, rights = layout.bucket.unpack(kept), layout.rights(second)
        for name, left in layout.lefts(first).items():
            kernels.orthogonalise(left)
            matrix = pieces[name].view(layout.matrices[name])
            torch.mm(matrix.t(), left, out=rights[name])
            if bool(left.isfinite().all()):  # else every rank keeps what it has, less what is not finite itself
                matrix.addmm_(left, rights[name].t(), alpha=-1)

    @torch.no_grad()
    def _multiply(self, layout: _Layout, first: Tensor, second: Tensor) -> Tensor:
        total = first.new_empty(layout.bucket.num_elements)
        places = layout.bucket.unpack(total)
        rights = layout.rights(second)
        for name, left in layout.lefts(first).items():
            kernels.multiply_factors(left, rights[name], places[name].view(-1))
            self._rights[name] = rights[name].clone()
            kernels.orthogonalise(self._rights[name])  # P hangs on what it spans alone, and is more exact
        for name, part in layout.whole(first).items():
            places[name].copy_(part.view(places[name].shape))
        return total


def make_powersgd(choice: Choice, rank: int) -> PowerSgdCodec:
    """The codec of `powersgd(...)` in a plan."""
    return PowerSgdCodec(int(choice["rank"]))
