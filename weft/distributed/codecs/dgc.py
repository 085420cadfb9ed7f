"""Deep gradient compression: top-k of velocities that every rank accumulates by itself (Lin et al., 2018).

    u <- m u + g             momentum correction: what waits is discounted as if it had been sent at once
    v <- v + u
    sent = top-k of v;  u and v become 0 where it was sent (momentum factor masking)
    w <- w - lr sum_r sent_r                                        the optimizer has no momentum of its own

Gradients, weighted by their share s of the mean, are clipped by the norm of their bucket, to c sqrt(s) where `clip` is
c: of N equal ranks to c / sqrt(N). In the first `warmup` messages the ratio falls from a quarter to its own, by the
same factor in each.

With momentum after the sum instead (topk), a number that waited for t steps loses the m^t that it should have had, and
the momentum of the past goes on pushing in its old direction.
"""

import math
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.packing import Bucket
from weft.distributed.codecs.sparse import AbstractSparseCodec, SparseSum
from weft.planning.codec_cost import CodecCost, codec_cost, num_selected
from weft.specs.plan import Choice

__all__ = ["DgcCodec", "make_dgc", "warm_ratio"]

FIRST_RATIO = 0.25


def warm_ratio(ratio: float, warmup: int, number: int) -> float:
    """Of message `number`, the first of which is 0.

    >>> [round(warm_ratio(0.001, 4, number), 4) for number in range(6)]
    [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]
    """
    if number >= warmup or ratio >= FIRST_RATIO:
        return ratio
    return float(FIRST_RATIO * (ratio / FIRST_RATIO) ** (number / warmup))


@final
class DgcCodec(AbstractSparseCodec):
    """`compress=dgc(ratio)`, for synchronous ranks in a group.

    Args:
        ratio: of the elements of a bucket that are sent, after the warm-up.
        warmup: messages, which are steps, until then.
        clip: the largest norm that the sum of a bucket should have; each rank clips its part. 0 for none.
        total: how ranks add up what they send.
        rank: whose draws these are, where sums are quantised.
    """

    def __init__(
        self,
        ratio: float = 0.001,
        warmup: int = 100,
        clip: float = 0.0,
        *,
        total: SparseSum = SparseSum(),  # noqa: B008 -- frozen
        rank: int = 0,
    ) -> None:
        super().__init__(total, rank, "velocity")
        self._choice = Choice("dgc", (("ratio", ratio), ("warmup", warmup), ("clip", clip)))
        self._ratio, self._warmup, self._clip = ratio, warmup, clip
        self._momentum, self._nesterov = 0.0, False

    @property
    def takes_momentum(self) -> bool:
        return True

    def set_momentum(self, momentum: float, *, nesterov: bool) -> None:
        self._momentum, self._nesterov = momentum, nesterov

    def num_expected(self, bucket: Bucket) -> int:
        return num_selected(self._ratio, bucket.num_elements)

    def num_sent(self, bucket: Bucket) -> None:
        return None

    def select(self, bucket: Bucket, message: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kept = self._beside(bucket, message)
        ratio = warm_ratio(self._ratio, self._warmup, self._counter.next(bucket))
        count, factor = num_selected(ratio, bucket.num_elements), scale * self._clipping(message, scale)
        if not self._momentum:
            places = kernels.add_and_select(kept, message, factor, count)
            return places, kernels.take(kept, places)
        velocity = self._beside(bucket, message, "velocity")
        places = kernels.add_and_select(
            kept, message, factor, count, velocity=velocity, momentum=self._momentum, nesterov=self._nesterov
        )
        return places, kernels.take(kept, places, velocity)

    def cost(self, bucket: Bucket) -> CodecCost:
        """After the warm-up."""
        cost = codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)
        return cost if self._momentum else replace(cost, memory_bytes=cost.memory_bytes / 2)

    def _clipping(self, message: Tensor, scale: float) -> float:
        """The factor that brings a weighted gradient, which counts with a share of 1 / ranks, below the local limit."""
        if not self._clip:
            return 1.0
        # N ranks whose weighted gradients have a norm of c / sqrt(N), and nothing in common, have a sum with one of c.
        norm = scale * float(torch.linalg.vector_norm(message, dtype=torch.float64))
        return min(1.0, self._clip * math.sqrt(scale) / norm) if norm else 1.0


def make_dgc(choice: Choice, rank: int) -> DgcCodec:
    """The codec of `dgc(...)` in a plan."""
    ratio, warmup, clip = float(choice["ratio"]), int(choice["warmup"]), float(choice["clip"])
    return DgcCodec(ratio, warmup, clip, total=SparseSum.of(choice), rank=rank)
