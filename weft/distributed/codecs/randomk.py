"""Random-k: ranks send numbers of the same random places, which all know, so that no place travels and sums are added.

    elements    | . . x . | . x . . | x . . . | . . . x |      one place at random in each of k equal parts, another
    sent        [ a_2 ][ a_5 ][ a_8 ][ a_15 ]                   one in every step; the others are kept

The draw hangs on the tensor and the step and not on the rank: a transport may add up what was sent.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import AbstractCodec, Kept, Reduction, malformed
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.packing import Bucket, Empty, Piece
from weft.distributed.codecs.residuals import Residuals, working_type
from weft.distributed.group.calls import AllReduce, ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.planning.codec_cost import CodecCost, codec_cost, num_selected
from weft.specs.plan import Choice

__all__ = ["RandomkCodec", "make_randomk"]

ALL_RANKS = 0


def draw_places(num_elements: int, count: int, key: int, device: torch.device) -> Tensor:
    """Ascending, all different, each place as likely as any other (int64).

    >>> draw_places(100, 4, 7, torch.device("cpu")) // 25
    tensor([0, 1, 2, 3])
    """
    parts = torch.arange(count, dtype=torch.float64, device=device)
    draws = kernels.uniform(key, count, device).double()
    begins = (parts * num_elements / count).floor()
    lengths = ((parts + 1) * num_elements / count).floor() - begins
    return (begins + (draws * lengths).floor()).long()


@final
class RandomkCodec(AbstractCodec):
    """`compress=randomk(ratio)`."""

    def __init__(self, ratio: float = 0.01) -> None:
        self._choice = Choice("randomk", (("ratio", ratio),))
        self._ratio = ratio
        self._residuals = Residuals()
        self._counter = MessageCounter(ALL_RANKS)
        self._places: dict[tuple[Piece, ...], Tensor] = {}  # of the last message of each bucket

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return True

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor:
        return empty((num_selected(self._ratio, bucket.num_elements),), self._sent_as(bucket))

    @torch.no_grad()
    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        if not bucket.dtype.is_floating_point:
            return message.clone()
        kept = self._residuals.beside(bucket, message.device)
        kernels.add(kept, message.reshape(-1).to(kept.dtype), scale)
        count = num_selected(self._ratio, bucket.num_elements)
        places = draw_places(bucket.num_elements, count, self._counter.next_key(bucket), message.device)
        self._places[bucket.pieces] = places
        sent = kept[places] if out is None else torch.index_select(kept, 0, places, out=out)
        kept[places] = 0
        if not bool(message.isfinite().all()):  # told at once: when the turn of its place comes, the step is over
            sent.fill_(torch.nan)
            self._residuals.drop_unfit(bucket)
        return sent

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        yield AllReduce(sent, op)
        return self.decode(bucket, sent, out)

    @torch.no_grad()
    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        """Of the message that was encoded last: others of this step have the same places."""
        if not bucket.dtype.is_floating_point:
            return sent if out is None else out.copy_(sent.view(out.shape))
        places = self._places.get(bucket.pieces)
        if places is None or sent.dtype != self._sent_as(bucket) or sent.shape != places.shape:
            raise malformed(bucket, sent)
        dense = torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=sent.device) if out is None else out.zero_()
        dense.view(-1)[places] = sent.to(bucket.dtype)
        return dense

    def is_waiting(self, name: str) -> bool:
        return self._residuals.is_waiting(name)

    def memory(self) -> Mapping[str, Kept]:
        kept = self._residuals.as_memory("residual/")
        return kept | self._counter.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._counter.remember(memory)
        self._residuals.restore_from(memory, "residual/")

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)

    @staticmethod
    def _sent_as(bucket: Bucket) -> torch.dtype:
        return working_type(bucket.dtype)


def make_randomk(choice: Choice, rank: int) -> RandomkCodec:
    """The codec of `randomk(...)` in a plan."""
    return RandomkCodec(float(choice["ratio"]))
