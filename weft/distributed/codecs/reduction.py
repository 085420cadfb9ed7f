"""How encoded messages are added up among the ranks of a group: by its all-reduce, or gathered and decoded."""

from typing import final

from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec, Reduction
from weft.distributed.codecs.packing import Bucket
from weft.distributed.group.calls import AllGather, AllReduce, ReduceOp
from weft.distributed.group.group import AbstractGroup, AbstractWork

__all__ = ["ReductionWork", "add_encoded", "gather_encoded"]


def add_encoded(codec: AbstractCodec, bucket: Bucket, sent: Tensor, op: ReduceOp, out: Tensor | None) -> Reduction:
    """The group adds them up, and the total is decoded once.

    Args:
        codec: of this rank; its messages may be summed.
        bucket: of the message.
        sent: as the codec encoded it; holds the encoded total in the end.
        op: `sum` or `mean`.
        out: where the total is written; None to make memory for it.
    """
    yield AllReduce(sent, op)
    return codec.decode(bucket, sent, out)


def gather_encoded(
    codec: AbstractCodec, bucket: Bucket, sent: Tensor, size: int, op: ReduceOp, out: Tensor | None
) -> Reduction:
    """Every rank gets all of them, of one length, and adds them up in the order of ranks, its own decoded like the
    others': so all have the same bits.

    Args:
        codec: of this rank.
        bucket: of the message.
        sent: as the codec encoded it.
        size: how many ranks there are.
        op: `sum` or `mean`.
        out: where the total is written; None to make memory for it.
    """
    assert op in ("sum", "mean"), "messages are added up"
    everyone = sent.new_empty((size, *sent.shape))
    yield AllGather(everyone, sent.unsqueeze(0))
    total = codec.decode(bucket, everyone[0], out)
    for other in everyone[1:]:
        total.add_(codec.decode(bucket, other).view_as(total))
    return total.div_(size) if op == "mean" else total


@final
class ReductionWork:
    """A reduction that a group carries out. Its first call is started at once, later ones when it is waited for: ranks
    start calls in the same order, and none may depend on which message came first."""

    def __init__(self, group: AbstractGroup, reduction: Reduction) -> None:
        self._group = group
        self._reduction = reduction
        self._work: AbstractWork = group.start(next(reduction))

    def is_done(self) -> bool:
        """Whether the call under way is done. To ask is also what moves some groups on."""
        return self._work.is_done()

    def wait(self) -> Tensor:
        """The decoded total. May be called once."""
        while True:
            self._work.wait()
            try:
                self._work = self._group.start(next(self._reduction))
            except StopIteration as end:
                total: Tensor = end.value
                return total
