"""How the messages of buckets are added up, and which part of every sum comes to this rank.

AllReducer        [ sum of w2, b1, w1 ]  on every rank                  who makes every update
ScatterReducer    [ sum of w2, b1 |   on rank 0,   | w1 ]  on rank 1    who each make those of their own pieces

data=2 shard=2    shard group {0, 1}: reduce-scatter      then, of each part, an all-reduce between {0, 2} and {1, 3}
                  shard group {2, 3}: reduce-scatter
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, ReductionWork, scatter_encoded
from weft.distributed.group.calls import AllReduce, ReduceOp, ReduceScatter
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.recording import handed_bytes, wire_bytes
from weft.distributed.placement.bucket_cut import BucketCut

__all__ = ["AbstractReducer", "AllReducer", "PendingSum", "ScatterReducer"]


class PendingSum(Protocol):
    """A sum under way."""

    @property
    def computed(self) -> float:
        """Seconds of decoding and adding up."""

    @property
    def num_bytes(self) -> int:
        """Handed to the transport; all of them once it has been waited for."""

    @property
    def wire_bytes(self) -> int:
        """That left this rank."""

    def is_done(self) -> bool:
        """Whether its last call is done. To ask is also what moves some groups on; asked in the order of buckets."""

    def wait(self) -> Tensor:
        """The decoded sum. May be called once, in the order of buckets."""


class AbstractReducer(ABC):
    """Of the buckets of one model, each known by its index."""

    @property
    @abstractmethod
    def buckets(self) -> tuple[Bucket, ...]:
        """Which gradients travel together, in the order in which backward fills them."""

    @property
    @abstractmethod
    def keeps_whole(self) -> bool:
        """Whether gradients stay in memory to the end of a step; else they are let go as their sums arrive, and few are
        under way at a time."""

    @abstractmethod
    def memory(self) -> list[Tensor]:
        """For messages and sums, that it keeps from step to step."""

    @abstractmethod
    def encode(self, index: int, message: Tensor, *, share: float, scale: float) -> Sequence[Tensor]:
        """The tensors that are sent for `scale` times the message of a bucket: one for all, or one for each rank.

        Args:
            share: with which it counts, as codecs have it.

        Raises:
            EncodingError: a value does not fit.
        """

    @abstractmethod
    def start(self, index: int, sent: Sequence[Tensor], op: ReduceOp, message: Tensor) -> PendingSum:
        """Begin to add up what all ranks send of a bucket.

        Args:
            sent: as `encode` returned it.
            message: it was encoded from; memory that the sum may be decoded into.
        """

    @abstractmethod
    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        """The sums of a bucket, by name."""


@final
class AllReducer(AbstractReducer):
    """Every rank gets every sum.

    Args:
        groups: of each bucket, the ranks that add it up.
    """

    def __init__(self, groups: Sequence[AbstractGroup], codec: AbstractCodec, buckets: Sequence[Bucket]) -> None:
        self._groups = groups
        self._codec = codec
        self._buckets = tuple(buckets)
        pairs = tuple(zip(buckets, groups, strict=True))
        for bucket, group in pairs:
            codec.meet(bucket, group)
        self._encoded = [codec.make_memory(bucket, group.empty) for bucket, group in pairs]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._buckets

    @property
    def keeps_whole(self) -> bool:
        return True

    def memory(self) -> list[Tensor]:
        return [memory for memory in self._encoded if memory is not None]

    def encode(self, index: int, message: Tensor, *, share: float, scale: float) -> Sequence[Tensor]:
        bucket, memory = self._buckets[index], self._encoded[index]
        return [self._codec.encode(bucket, message, memory, share=share, scale=scale)]

    def start(self, index: int, sent: Sequence[Tensor], op: ReduceOp, message: Tensor) -> PendingSum:
        group = self._groups[index]
        return ReductionWork(group, self._codec.reduce(self._buckets[index], sent[0], group, op, out=message))

    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        """A tensor that travelled alone is itself, not a view: whoever gave it knows it again."""
        bucket = self._buckets[index]
        return {bucket.names[0]: total} if len(bucket.pieces) == 1 else bucket.unpack(total)


@final
class ScatterReducer(AbstractReducer):
    """Every rank gets the sums of its own pieces.

    Args:
        shard: the ranks that hold pieces of the same tensors.
        others_of: of a parameter, the ranks that hold the same piece of it and have gradients to add; None for none.
        cuts: of the buckets, in the order of backward.
        keeps_whole: sums are written over the part of the message that is this rank's; else in memory of their own, and
            the message is let go.
    """

    def __init__(
        self,
        shard: AbstractGroup,
        others_of: Callable[[str], AbstractGroup | None],
        codec: AbstractCodec,
        cuts: Sequence[BucketCut],
        *,
        keeps_whole: bool,
    ) -> None:
        self._shard = shard
        self._codec = codec
        self._cuts = cuts
        self._keeps_whole = keeps_whole
        self._others = [others_of(cut.bucket.names[0]) for cut in cuts]
        own = [cut.parts[shard.rank] for cut in cuts]
        self._encoded = [codec.make_memory(cut.bucket, shard.empty) if codec.is_dense else None for cut in cuts]
        encoded = [codec.make_memory(part, shard.empty) if codec.is_dense else None for part in own]
        self._sums = [
            part.make_memory(shard.empty) if memory is None and not keeps_whole else memory
            for part, memory in zip(own, encoded, strict=True)
        ]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(cut.bucket for cut in self._cuts)

    @property
    def keeps_whole(self) -> bool:
        return self._keeps_whole

    def memory(self) -> list[Tensor]:
        return [memory for memory in (*self._encoded, *self._sums) if memory is not None]

    def encode(self, index: int, message: Tensor, *, share: float, scale: float) -> Sequence[Tensor]:
        """Each part by itself where a part of what was encoded says nothing."""
        cut, codec = self._cuts[index], self._codec
        if codec.is_dense:
            return [codec.encode(cut.bucket, message, self._encoded[index], share=share, scale=scale)]
        parts = zip(cut.parts, message.view(-1).split(cut.sizes), strict=True)
        return [codec.encode(part, own, share=share, scale=scale) for part, own in parts]

    def start(self, index: int, sent: Sequence[Tensor], op: ReduceOp, message: Tensor) -> PendingSum:
        cut, own, rank = self._cuts[index], self._sums[index], self._shard.rank
        dense = sent[0].view(-1) if self._codec.is_dense else message.view(-1)
        if own is None:
            begin = sum(cut.sizes[:rank])
            own = dense[begin : begin + cut.sizes[rank]]
        if not self._codec.is_dense:
            reduction = scatter_encoded(self._codec, cut.parts[rank], sent, self._shard, own)
            return _EncodedSum(ReductionWork(self._shard, reduction), self._others[index])
        scatter = ReduceScatter(own, dense, op, cut.sizes)
        return _ScatteredSum(self._codec, cut.parts[rank], scatter, self._shard, self._others[index])

    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        part = self._cuts[index].parts[self._shard.rank]
        return part.unpack(total) if part.pieces else {}


@final
class _ScatteredSum:
    """A reduce-scatter in the shard group, and then an all-reduce of the part between such groups."""

    def __init__(
        self,
        codec: AbstractCodec,
        part: Bucket,
        scatter: ReduceScatter,
        shard: AbstractGroup,
        data: AbstractGroup | None,
    ) -> None:
        self._codec = codec
        self._part = part
        self._own = scatter.output
        self._data = data
        self._op: ReduceOp = scatter.op
        self._is_last = data is None or data.size == 1
        self.computed, self.num_bytes, self.wire_bytes = 0.0, 0, 0
        self._work = self._start(shard, scatter)

    def is_done(self) -> bool:
        if not self._is_last and self._work.is_done():
            self._go_on()
        return self._is_last and self._work.is_done()

    def wait(self) -> Tensor:
        if not self._is_last:
            self._go_on()
        self._work.wait()
        return self._codec.decode(self._part, self._own)

    def _go_on(self) -> None:
        self._work.wait()
        assert self._data is not None, "there are others"
        self._work = self._start(self._data, AllReduce(self._own, self._op))
        self._is_last = True

    def _start(self, group: AbstractGroup, call: ReduceScatter | AllReduce) -> AbstractWork:
        self.num_bytes += handed_bytes(call)
        self.wire_bytes += wire_bytes(call, group.rank, group.size)
        return group.start(call)


@final
class _EncodedSum:
    """A reduce-scatter of encoded parts in the shard group, and then an all-reduce of the decoded sum between such
    groups."""

    def __init__(self, scatter: ReductionWork, data: AbstractGroup | None) -> None:
        self._scatter = scatter
        self._data = data
        self.num_bytes = self.wire_bytes = 0

    @property
    def computed(self) -> float:
        return self._scatter.computed

    def is_done(self) -> bool:
        return self._scatter.is_done()

    def wait(self) -> Tensor:
        total = self._scatter.wait()
        self.num_bytes, self.wire_bytes = self._scatter.num_bytes, self._scatter.wire_bytes
        if self._data is not None and self._data.size > 1:
            call = AllReduce(total)
            self._data.run(call)
            self.num_bytes += handed_bytes(call)
            self.wire_bytes += wire_bytes(call, self._data.rank, self._data.size)
        return total
