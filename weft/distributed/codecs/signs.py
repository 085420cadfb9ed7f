"""One bit for every number, and two numbers for every block; what is lost is added to the next message.

    a = kept + g                                                  Seide et al., 2014; Karimireddy et al., 2019
    sent    [ scales of blocks, float32 ][ signs, 1 bit each ]
    kept    a - decoded

Blocks end with their tensor: gradients of different layers differ in size.

onebit     a number that is not negative becomes the mean of those of its block, a negative one that of the negative
sign       sgn(a_i) times the mean of |a| of its block
"""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import Kept
from weft.distributed.codecs.gathered import AbstractGatheredCodec
from weft.distributed.codecs.layout import split_bytes
from weft.distributed.codecs.packing import Bucket
from weft.distributed.codecs.residuals import Residuals
from weft.planning.codec_cost import CodecCost, codec_cost
from weft.specs.plan import Choice

__all__ = ["SignCodec", "make_onebit", "make_sign"]


@final
class SignCodec(AbstractGatheredCodec):
    """`compress=onebit` and `compress=sign`.

    Args:
        block: elements that share scales.
        symmetric: whether both scales of a block are the mean of its absolute values.
    """

    def __init__(self, block: int = 4096, *, symmetric: bool = False) -> None:
        super().__init__()
        self._choice = Choice("sign" if symmetric else "onebit", (("block", block),))
        self._block, self._symmetric = block, symmetric
        self._residuals = Residuals()

    def num_sent(self, bucket: Bucket) -> int:
        return int(self.cost(bucket).sent_bytes)

    def write(self, bucket: Bucket, message: Tensor, scale: float, out: Tensor) -> Tensor:
        kept = self._residuals.beside(bucket, message.device)
        kernels.add(kept, message, scale)
        for part, scales, codes in self._parts(bucket, out, kept):
            found, both = kernels.encode_signs(part, self._block, symmetric=self._symmetric)
            scales.copy_(both.view(-1)[: scales.numel()])
            codes.copy_(found)
            if not bool(scales.isfinite().all()):
                self._residuals.drop_unfit(bucket)
        return out

    def read(self, bucket: Bucket, sent: Tensor, into: Tensor, *, add: bool) -> None:
        for place, scales, codes in self._parts(bucket, sent, into):
            both = torch.cat([scales, -scales]) if self._symmetric else scales
            kernels.decode_signs(codes, both.view(2, -1), self._block, place, add=add)

    def is_waiting(self, name: str) -> bool:
        return self._residuals.is_waiting(name)

    def memory(self) -> Mapping[str, Kept]:
        return self._residuals.as_memory("residual/")

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._residuals.restore_from(memory, "residual/")

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize, bucket.shapes)

    def _parts(self, bucket: Bucket, sent: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each tensor its elements, its scales and its codes. A symmetric block has one scale, of both signs."""
        each = 1 if self._symmetric else 2
        num_scales = [each * -(-size // self._block) for size in bucket.sizes]
        num_codes = [-(-size // 8) for size in bucket.sizes]
        scales, codes = split_bytes(sent, [(sum(num_scales), torch.float32), (sum(num_codes), torch.uint8)])
        yield from zip(flat.split(bucket.sizes), scales.split(num_scales), codes.split(num_codes), strict=True)


def make_onebit(choice: Choice, rank: int) -> SignCodec:
    """The codec of `onebit` in a plan."""
    return SignCodec(int(choice["block"]))


def make_sign(choice: Choice, rank: int) -> SignCodec:
    """The codec of `sign` in a plan."""
    return SignCodec(int(choice["block"]), symmetric=True)
