"""Top-k and threshold: the largest numbers are sent, and the others wait until they are large enough.

topk         the k = ratio n largest of a bucket: exact, or about as many by a threshold that a sample tells
threshold    all that reach a given size
"""

from typing import Literal, cast, final

from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.packing import Bucket
from weft.distributed.codecs.sparse import AbstractSparseCodec, SparseSum
from weft.planning.codec_cost import CodecCost, codec_cost, num_selected
from weft.specs.plan import Choice

__all__ = ["ThresholdCodec", "TopkCodec", "make_threshold", "make_topk"]


@final
class TopkCodec(AbstractSparseCodec):
    """`compress=topk(ratio)`.

    Args:
        ratio: of the elements of a bucket that are sent.
        select: `exact`, or `sampled`: all above a threshold at which a sample has so many.
        total: how ranks add up what they send.
        rank: whose sample it is.
    """

    def __init__(
        self,
        ratio: float = 0.01,
        select: Literal["exact", "sampled"] = "exact",
        *,
        total: SparseSum = SparseSum(),  # noqa: B008 -- frozen
        rank: int = 0,
    ) -> None:
        super().__init__(total, rank)
        self._choice = Choice("topk", (("ratio", ratio), ("select", select)))
        self._ratio, self._is_exact = ratio, select == "exact"

    @property
    def is_even(self) -> bool:
        return self._is_exact

    @property
    def mixing_step(self) -> float:
        """By measurement: estimates that follow in steps of so little swing to and fro at more than about this."""
        return min(1.0, 2 * self._ratio)

    def num_expected(self, bucket: Bucket) -> int:
        return num_selected(self._ratio, bucket.num_elements)

    def num_sent(self, bucket: Bucket) -> int | None:
        return int(self.cost(bucket).sent_bytes) if self._is_exact else None

    def select(self, bucket: Bucket, message: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kept, count = self._beside(bucket, message), num_selected(self._ratio, bucket.num_elements)
        if self._is_exact:
            places = kernels.add_and_select(kept, message, scale, count)
        else:
            key = self._counter.next_key(bucket)
            threshold = kernels.estimate_threshold(kept, message, scale, count, key)
            places = kernels.add_and_select_above(kept, message, scale, threshold)
        return places, kernels.take(kept, places)

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)


@final
class ThresholdCodec(AbstractSparseCodec):
    """`compress=threshold(value)`: how many are sent hangs on the gradients."""

    def __init__(self, value: float = 1e-3) -> None:
        super().__init__(SparseSum("gather"), 0)
        self._choice = Choice("threshold", (("value", value),))
        self._value = value

    @property
    def is_even(self) -> bool:
        return False

    def num_expected(self, bucket: Bucket) -> None:
        return None

    def num_sent(self, bucket: Bucket) -> None:
        return None

    def select(self, bucket: Bucket, message: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kept = self._beside(bucket, message)
        places = kernels.add_and_select_above(kept, message, scale, self._value)
        return places, kernels.take(kept, places)

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)


def make_topk(choice: Choice, rank: int) -> TopkCodec:
    """The codec of `topk(...)` in a plan."""
    select = cast(Literal["exact", "sampled"], choice["select"])
    return TopkCodec(float(choice["ratio"]), select, total=SparseSum.of(choice), rank=rank)


def make_threshold(choice: Choice, rank: int) -> ThresholdCodec:
    """The codec of `threshold(...)` in a plan."""
    return ThresholdCodec(float(choice["value"]))
