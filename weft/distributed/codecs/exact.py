"""No compression: a message is sent as it is, in place."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec, Kept, Reduction, malformed
from weft.distributed.codecs.packing import Bucket, Empty
from weft.distributed.codecs.reduction import add_encoded
from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.planning.codec_cost import CodecCost, codec_cost
from weft.specs.plan import Choice

__all__ = ["ExactCodec", "make_exact"]


@final
class ExactCodec(AbstractCodec):
    """`compress=none`. Nothing is copied unless memory is given for it."""

    @property
    def is_exact(self) -> bool:
        return True

    @property
    def is_summable(self) -> bool:
        return True

    def make_memory(self, bucket: Bucket, empty: Empty) -> None:
        return None

    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        scaled = message if scale == 1.0 else message * scale
        return scaled if out is None else out.copy_(scaled.view_as(out))

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        return add_encoded(self, bucket, sent, op, out)

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        if out is sent:  # a sum that was made in place
            return sent
        if not bucket.accepts(sent):
            raise malformed(bucket, sent)
        return sent if out is None else out.copy_(sent.view_as(out))

    def memory(self) -> Mapping[str, Kept]:
        return {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        pass

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost("none", bucket.num_bytes)


def make_exact(choice: Choice, rank: int) -> ExactCodec:
    """The codec of `none` in a plan."""
    return ExactCodec()
