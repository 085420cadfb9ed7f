"""How the messages of buckets are added up, and which part of every sum comes to this rank.

AllReducer        [ sum of w2, b1, w1 ]  on every rank                  who makes every update
ScatterReducer    [ sum of w2, b1 |   on rank 0,   | w1 ]  on rank 1    who each make those of their own pieces

data=2 shard=2    shard group {0, 1}: reduce-scatter      then, of each part, an all-reduce between {0, 2} and {1, 3}
                  shard group {2, 3}: reduce-scatter
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, ReductionWork
from weft.distributed.group.calls import AllReduce, ReduceOp, ReduceScatter
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.placement.sharded import ShardedState

__all__ = ["AbstractReducer", "AllReducer", "PendingSum", "ScatterReducer"]


class PendingSum(Protocol):
    """A sum under way."""

    def is_done(self) -> bool:
        """Whether its last call is done. To ask is also what moves some groups on; asked in the order of buckets."""

    def wait(self) -> Tensor:
        """The decoded sum. May be called once, in the order of buckets."""


class AbstractReducer(ABC):
    """Of the buckets of one model, each known by its index."""

    @abstractmethod
    def start(self, index: int, sent: Tensor, op: ReduceOp, message: Tensor) -> PendingSum:
        """Begin to add up what all ranks send of a bucket.

        Args:
            sent: the encoded message.
            message: it was encoded from; memory that the sum may be decoded into.
        """

    @abstractmethod
    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        """The sums of a bucket, by name."""


@final
class AllReducer(AbstractReducer):
    """Every rank gets every sum."""

    def __init__(self, group: AbstractGroup, codec: AbstractCodec, buckets: Sequence[Bucket]) -> None:
        self._group = group
        self._codec = codec
        self._buckets = buckets

    def start(self, index: int, sent: Tensor, op: ReduceOp, message: Tensor) -> PendingSum:
        reduction = self._codec.reduce(self._buckets[index], sent, self._group.size, op, out=message)
        return ReductionWork(self._group, reduction)

    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        """A tensor that travelled alone is itself, not a view: whoever gave it knows it again."""
        bucket = self._buckets[index]
        return {bucket.names[0]: total} if len(bucket.pieces) == 1 else bucket.unpack(total)


@final
class ScatterReducer(AbstractReducer):
    """Every rank gets the sums of its own pieces.

    Args:
        shard: the ranks that hold the optimizer's state together.
        data: those of all such groups that hold the same pieces.
    """

    def __init__(
        self, shard: AbstractGroup, data: AbstractGroup, codec: AbstractCodec, placement: ShardedState
    ) -> None:
        assert codec.is_summable, "a part of what was encoded is no message of its own"
        self._shard = shard
        self._data = data
        self._codec = codec
        self._cuts = placement.cuts
        encoded = [codec.make_memory(cut.parts[shard.rank], shard.empty) for cut in self._cuts]
        self._sums = [part if memory is None else memory for part, memory in zip(placement.parts, encoded, strict=True)]

    def start(self, index: int, sent: Tensor, op: ReduceOp, message: Tensor) -> PendingSum:
        cut, own = self._cuts[index], self._sums[index]
        work = self._shard.start(ReduceScatter(own, sent.view(-1), op, cut.sizes))
        return _ScatteredSum(self._codec, cut.parts[self._shard.rank], own, work, self._data, op)

    def unpack(self, index: int, total: Tensor) -> Mapping[str, Tensor]:
        return self._cuts[index].parts[self._shard.rank].unpack(total)


@final
class _ScatteredSum:
    """A reduce-scatter in the shard group, and then an all-reduce of the part between such groups."""

    def __init__(
        self, codec: AbstractCodec, part: Bucket, own: Tensor, work: AbstractWork, data: AbstractGroup, op: ReduceOp
    ) -> None:
        self._codec = codec
        self._part = part
        self._own = own
        self._work = work
        self._data = data
        self._op: ReduceOp = op
        self._is_last = data.size == 1

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
        self._work = self._data.start(AllReduce(self._own, self._op))
        self._is_last = True
