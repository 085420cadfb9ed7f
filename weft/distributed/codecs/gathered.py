"""Messages that no transport can add up: bytes, which all ranks gather, decode and add.

rank 0   [ bytes 0 ] --.      every rank has      out  =  decoded 0
rank 1   [ bytes 1 ] --+-->   all of them         out +=  decoded 1       in the order of ranks, its own decoded like
rank 2   [ bytes 2 ] --'                          out +=  decoded 2       the others': so all have the same bits
"""

from collections.abc import Generator, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.bytes import AbstractByteCodec, finished
from weft.distributed.codecs.codec import Reduction, malformed
from weft.distributed.codecs.packing import Bucket, Piece
from weft.distributed.group.calls import AllGather, Call, ReduceOp
from weft.distributed.group.group import AbstractGroup

__all__ = ["AbstractGatheredCodec", "GatherMemory", "gather_and_add"]


class AbstractGatheredCodec(AbstractByteCodec):
    """Of messages of bytes that are gathered."""

    def __init__(self) -> None:
        self._gathered = GatherMemory()

    @final
    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        return gather_and_add(self, bucket, sent, group, op, out, self._gathered)


@final
class GatherMemory:
    """Memory for the messages of all ranks, kept from step to step, as fresh memory is slow; of each bucket, as several
    are under way at a time."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[Piece, ...], Tensor] = {}

    def beside(self, bucket: Bucket, size: int, sent: Tensor) -> Tensor:
        memory = self._gathered.get(bucket.pieces)
        if memory is None or memory.shape != (size, sent.numel()) or memory.device != sent.device:
            memory = self._gathered[bucket.pieces] = sent.new_empty(size, sent.numel())
        return memory


def gather_and_add(
    codec: AbstractByteCodec,
    bucket: Bucket,
    sent: Tensor,
    group: AbstractGroup,
    op: ReduceOp,
    out: Tensor | None,
    memory: GatherMemory,
) -> Reduction:
    """The sum of what all ranks sent, in their order.

    Args:
        codec: of this rank, which reads the messages.
        bucket: of the message.
        sent: as the codec encoded it.
        group: of all ranks.
        op: `sum` or `mean`.
        out: where the total is written; None to make memory for it.
        memory: to gather into.
    """
    assert op in ("sum", "mean"), "messages are added up"
    if not bucket.dtype.is_floating_point:
        raise malformed(bucket, sent)
    rows: Sequence[Tensor]
    if codec.is_even:
        rows = tuple((yield from gather_even(sent, memory.beside(bucket, group.size, sent))))
    else:
        rows = yield from gather_uneven(sent, group)
    place = codec.place_for(bucket, sent, out)
    with torch.no_grad():
        for rank, row in enumerate(rows):
            codec.check_length(bucket, row)
            if bucket.num_elements:
                codec.read(bucket, row, place, add=rank > 0)
        if op == "mean":
            place.div_(group.size)
        return finished(bucket, place, out)


def gather_even(sent: Tensor, everyone: Tensor) -> Generator[Call, None, Tensor]:
    """Every rank's bytes, one row each in the order of ranks; all have as many.

    Args:
        sent: of this rank.
        everyone: where they are gathered.
    """
    yield AllGather(everyone, sent.unsqueeze(0))
    return everyone


def gather_uneven(sent: Tensor, group: AbstractGroup) -> Generator[Call, None, Sequence[Tensor]]:
    """Every rank's bytes in the order of ranks, which tell each other first how many they have.

    Args:
        sent: of this rank.
        group: of all ranks.
    """
    lengths = torch.zeros(group.size, dtype=torch.int64)
    yield AllGather(lengths, torch.tensor([sent.numel()]))
    sizes = tuple(lengths.tolist())
    everyone = sent.new_empty(sum(sizes))
    yield AllGather(everyone, sent, sizes)
    return tuple(torch.split(everyone, list(sizes)))
