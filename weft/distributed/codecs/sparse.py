"""Codecs that send some of the numbers, with their places, and keep the others back.

    a     = kept + g                    select: which places to send; abstract here
    sent    [ values a_i ][ places i ]  ascending
    kept    a, and 0 where it was sent

Ranks gather what all have sent, or add it up on the way, by the algorithms of sparse_sums.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.bytes import AbstractByteCodec, finished
from weft.distributed.codecs.codec import Kept, Reduction, malformed
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.gathered import GatherMemory, gather_and_add
from weft.distributed.codecs.layout import split_bytes
from weft.distributed.codecs.links import link_of
from weft.distributed.codecs.packing import Bucket, Piece
from weft.distributed.codecs.qsgd import make_quantiser
from weft.distributed.codecs.residuals import Residuals, working_type
from weft.distributed.codecs.sparse_sums import (
    SparseAlgorithm,
    SparseReduction,
    SparseStream,
    Supports,
    forecast_sums,
    sum_sparse,
)
from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.planning.codec_cost import padded_bytes
from weft.specs.plan import Choice

__all__ = ["AbstractSparseCodec", "SparseSum"]

PLACE = torch.int32

ALGORITHMS: dict[str, SparseAlgorithm] = {
    "gather": "gather",
    "doubling": "recursive_doubling",
    "split": "split_gather",
    "dense": "dense_split_gather",
}
"""By the words of plans."""

ORDERED: tuple[SparseAlgorithm, ...] = ("gather", "split_gather", "dense_split_gather")
"""That add up in the order of ranks, to the same bits."""

Word = Literal["auto", "fastest", "gather", "doubling", "split", "dense"]


@dataclass(frozen=True)
class SparseSum:
    """How ranks add up what they have selected.

    Args:
        by: the algorithm; `fastest` on the links that the group is found to have, or `auto`, the fastest of those that
            add up in the order of ranks: then no bit of a run hangs on a measured time.
        bits: of the codes in which a sum that has filled up is gathered; 0 to gather it as it is.
    """

    by: Word = "auto"
    bits: int = 0

    @staticmethod
    def of(choice: Choice) -> "SparseSum":
        by = cast(Word, choice.get("sum", "auto"))
        return SparseSum(by, int(choice.get("bits", 0)))

    def algorithm(self, group: AbstractGroup, bucket: Bucket, count: int) -> SparseAlgorithm:
        """The same on all ranks: it hangs on the plan, the size of the bucket and a probe that all have the same of."""
        if self.by in ALGORITHMS:
            return ALGORITHMS[self.by]
        if self.bits:  # whether a sum is quantised must not hang on the time either
            return "dense_split_gather"
        value_bytes = working_type(bucket.dtype).itemsize
        supports = Supports(bucket.num_elements, count, value_bytes=value_bytes)
        seconds = forecast_sums(group.size, supports, link_of(group))
        allowed = ORDERED if self.by == "auto" else tuple(seconds)
        return min(allowed, key=seconds.__getitem__)


class AbstractSparseCodec(AbstractByteCodec):
    """Leaves to a codec which numbers are sent.

    Args:
        total: how they are added up.
        rank: whose draws these are, of samples and where sums are quantised.
        waiting: tensors beside every message, of numbers that wait to be sent, by use.
    """

    def __init__(self, total: SparseSum, rank: int, *waiting: str) -> None:
        self._total = total
        self._waiting = {use: Residuals() for use in ("residual", *waiting)}
        self._counter = MessageCounter(rank)
        self._draws = MessageCounter(rank, "sums")
        self._gathered = GatherMemory()
        self._tags: dict[tuple[Piece, ...], int] = {}  # of sums that are under way at once

    @abstractmethod
    def select(self, bucket: Bucket, message: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Places (int32, ascending) and values of what is sent of a message, which is kept no more."""

    @abstractmethod
    def num_expected(self, bucket: Bucket) -> int | None:
        """How many numbers every rank sends of a bucket, about; None where nobody knows."""

    @final
    def write(self, bucket: Bucket, message: Tensor, scale: float, out: Tensor) -> Tensor:
        places, values = self.select(bucket, message, scale)
        if not bool(values.isfinite().all()):  # they are the largest: more of them wait, and would come step by step
            for waiting in self._waiting.values():
                waiting.drop_unfit(bucket)
        length = padded_bytes(places.numel() * _pair_bytes(bucket))
        sent = out if out.numel() == length else out.new_zeros(length)
        to_values, to_places = _parts(bucket, sent, places.numel())
        to_values.copy_(values)
        to_places.copy_(places)
        return sent

    @final
    def read(self, bucket: Bucket, sent: Tensor, into: Tensor, *, add: bool) -> None:
        values, places = self._pairs(bucket, sent)
        if not add:
            into.zero_()
        try:
            kernels.scatter_add(into, places, values)
        except ValueError:  # a place that is none
            raise malformed(bucket, sent) from None

    @final
    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        count = self.num_expected(bucket)
        by = "gather" if count is None or group.size == 1 else self._total.algorithm(group, bucket, count)
        if by == "gather":
            return gather_and_add(self, bucket, sent, group, op, out, self._gathered)
        return self._add_up(bucket, sent, group, by, op, out)

    @final
    def is_waiting(self, name: str) -> bool:
        return any(waiting.is_waiting(name) for waiting in self._waiting.values())

    @final
    def memory(self) -> Mapping[str, Kept]:
        found = {**self._counter.memory(), **self._draws.memory()}
        for use, waiting in self._waiting.items():
            found |= waiting.as_memory(f"{use}/")
        return found

    @final
    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._counter.remember(memory)
        self._draws.remember(memory)
        for use, waiting in self._waiting.items():
            waiting.restore_from(memory, f"{use}/")

    def _beside(self, bucket: Bucket, message: Tensor, use: str = "residual") -> Tensor:
        return self._waiting[use].beside(bucket, message.device)

    def _add_up(
        self,
        bucket: Bucket,
        sent: Tensor,
        group: AbstractGroup,
        by: SparseAlgorithm,
        op: ReduceOp,
        out: Tensor | None,
    ) -> Reduction:
        values, places = self._pairs(bucket, sent)
        quantiser = None
        if self._total.bits and by == "dense_split_gather":
            quantiser = make_quantiser(self._total.bits, self._draws.next_key(bucket))
        tag = self._tags.setdefault(bucket.pieces, len(self._tags))
        stream = SparseStream(bucket.num_elements, values, places)
        summing: SparseReduction = sum_sparse(group.rank, group.size, stream, by, quantiser=quantiser, tag=tag)
        total = yield from summing
        place = self.place_for(bucket, sent, out)
        with torch.no_grad():
            if total.indices is None:
                place.copy_(total.values)
            else:
                kernels.scatter_add(place.zero_(), total.indices, total.values)
            if op == "mean":
                place.div_(group.size)
            return finished(bucket, place, out)

    @staticmethod
    def _pairs(bucket: Bucket, sent: Tensor) -> tuple[Tensor, ...]:
        """Values and places of a message."""
        count = sent.numel() // _pair_bytes(bucket)
        if sent.numel() != padded_bytes(count * _pair_bytes(bucket)):
            raise malformed(bucket, sent)
        return _parts(bucket, sent, count)


def _pair_bytes(bucket: Bucket) -> int:
    return PLACE.itemsize + working_type(bucket.dtype).itemsize


def _parts(bucket: Bucket, sent: Tensor, count: int) -> tuple[Tensor, ...]:
    return split_bytes(sent, [(count, working_type(bucket.dtype)), (count, PLACE)])
