"""TernGrad: every number becomes -s, 0 or s by chance, without a bias but for clipping (Wen et al., 2017).

g'  = g, clipped to c standard deviations of its tensor
s   = max |g'|, of each tensor (layer scaling)                   sent    [ s of each tensor ][ codes of 2 bits ]
t_i = s sgn(g'_i) b_i,   P(b_i = 1) = |g'_i| / s
"""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import Kept
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.gathered import AbstractGatheredCodec
from weft.distributed.codecs.layout import split_bytes
from weft.distributed.codecs.packing import Bucket
from weft.planning.codec_cost import CodecCost, codec_cost, num_ternary_bytes
from weft.specs.plan import Choice

__all__ = ["TernGradCodec", "make_terngrad"]

BITS = 2


@final
class TernGradCodec(AbstractGatheredCodec):
    """`compress=terngrad(clip)`.

    Args:
        clip: standard deviations beyond which a number is cut off; 0 for none.
        rank: whose draws these are.
    """

    def __init__(self, clip: float = 2.5, *, rank: int = 0) -> None:
        super().__init__()
        self._choice = Choice("terngrad", (("clip", clip),))
        self._clip = clip
        self._counter = MessageCounter(rank)

    def num_sent(self, bucket: Bucket) -> int:
        return int(self.cost(bucket).sent_bytes)

    def write(self, bucket: Bucket, message: Tensor, scale: float, out: Tensor) -> Tensor:
        key = self._counter.next_key(bucket)
        for index, (part, norm, codes) in enumerate(self._parts(bucket, out, message)):
            if not part.numel():
                norm.zero_()
                continue
            values = part if scale == 1.0 else part * scale
            if self._clip:
                limit = self._clip * _deviation(values)
                if limit <= torch.finfo(values.dtype).max:  # what is not finite is told as it is
                    values = values.clamp(-limit, limit)
            norm.copy_(kernels.block_norms(values, values.numel(), "max"))
            tensor_key = kernels.derive_key(key, index)
            codes.copy_(kernels.quantise(values, norm, values.numel(), BITS, tensor_key))
        return out

    def read(self, bucket: Bucket, sent: Tensor, into: Tensor, *, add: bool) -> None:
        for place, norm, codes in self._parts(bucket, sent, into):
            if place.numel():
                kernels.dequantise(codes, norm, place.numel(), BITS, place, add=add)

    def memory(self) -> Mapping[str, Kept]:
        return self._counter.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._counter.remember(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize, bucket.shapes)

    @staticmethod
    def _parts(bucket: Bucket, sent: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each tensor its elements, its scale and its codes."""
        lengths = [num_ternary_bytes(size) for size in bucket.sizes]
        norms, codes = split_bytes(sent, [(len(lengths), torch.float32), (sum(lengths), torch.uint8)])
        yield from zip(flat.split(bucket.sizes), norms.split(1), codes.split(lengths), strict=True)


def _deviation(values: Tensor) -> float:
    """In float64, about zero: the mean of a gradient is small beside its elements."""
    return float(values.double().square().mean().sqrt())


def make_terngrad(choice: Choice, rank: int) -> TernGradCodec:
    """The codec of `terngrad(...)` in a plan."""
    return TernGradCodec(float(choice["clip"]), rank=rank)
