"""QSGD: every number rounded by chance to a level of its block, without a bias (Alistarh et al., 2017).

    Q_s(v_i) = |v| sgn(v_i) xi_i / s        xi_i is l or l + 1 where l <= s |v_i| / |v| <= l + 1, and s |v_i| / |v| in
                                            the mean

    sent      [ norms of blocks, float32 ][ codes: sign and level, 2, 4 or 8 bits ]          s = 2^(bits - 1) - 1

|v| is the norm of a block: its largest number, or L2 as in the paper's bounds (`norm=l2`), which is larger and makes
larger errors: with 2 bits a small network did not learn. Nothing is kept back: the mean of what is sent is what was
given.
"""

from collections.abc import Mapping
from typing import Literal, cast, final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import Kept
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.gathered import AbstractGatheredCodec
from weft.distributed.codecs.layout import split_bytes
from weft.distributed.codecs.packing import Bucket
from weft.distributed.codecs.sparse_sums import Quantiser
from weft.planning.codec_cost import CodecCost, codec_cost, padded_bytes
from weft.specs.plan import Choice

__all__ = ["QsgdCodec", "make_qsgd", "make_quantiser"]


@final
class QsgdCodec(AbstractGatheredCodec):
    """`compress=qsgd(bits)`.

    Args:
        bits: of a code, 2, 4 or 8.
        block: elements that share a norm.
        norm: `max` for that of the largest element, or `l2`.
        rank: whose draws these are.
    """

    def __init__(self, bits: int = 8, block: int = 512, norm: Literal["l2", "max"] = "max", *, rank: int = 0) -> None:
        super().__init__()
        self._choice = Choice("qsgd", (("bits", bits), ("block", block), ("norm", norm)))
        self._bits, self._block, self._norm = bits, block, norm
        self._counter = MessageCounter(rank)

    def num_sent(self, bucket: Bucket) -> int:
        return int(self.cost(bucket).sent_bytes)

    def write(self, bucket: Bucket, message: Tensor, scale: float, out: Tensor) -> Tensor:
        scaled = message if scale == 1.0 else message * scale
        norms, codes = self._parts(bucket, out)
        norms.copy_(kernels.block_norms(scaled, self._block, self._norm))
        codes.copy_(kernels.quantise(scaled, norms, self._block, self._bits, self._counter.next_key(bucket)))
        return out

    def read(self, bucket: Bucket, sent: Tensor, into: Tensor, *, add: bool) -> None:
        norms, codes = self._parts(bucket, sent)
        kernels.dequantise(codes, norms, self._block, self._bits, into, add=add)

    def memory(self) -> Mapping[str, Kept]:
        return self._counter.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._counter.remember(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        return codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)

    def _parts(self, bucket: Bucket, sent: Tensor) -> tuple[Tensor, ...]:
        num_blocks = -(-bucket.num_elements // self._block)
        num_codes = -(-bucket.num_elements * self._bits // 8)
        return split_bytes(sent, [(num_blocks, torch.float32), (num_codes, torch.uint8)])


SUM_BLOCK = 1024


def make_quantiser(bits: int, key: int) -> Quantiser:
    """Of sums that are gathered, in blocks with a norm each.

    Args:
        bits: of a code.
        key: of this rank's draws.
    """

    def parts(sent: Tensor, num: int) -> tuple[Tensor, ...]:
        num_blocks, num_codes = -(-num // SUM_BLOCK), -(-num * bits // 8)
        return split_bytes(sent, [(num_blocks, torch.float32), (num_codes, torch.uint8)])

    def num_bytes(num: int) -> int:
        return padded_bytes(4 * -(-num // SUM_BLOCK) + -(-num * bits // 8))

    def encode(values: Tensor) -> Tensor:
        sent = torch.zeros(num_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        norms, codes = parts(sent, values.numel())
        norms.copy_(kernels.block_norms(values, SUM_BLOCK, "l2"))
        codes.copy_(kernels.quantise(values, norms, SUM_BLOCK, bits, key))
        return sent

    def decode(sent: Tensor, values: Tensor) -> None:
        norms, codes = parts(sent, values.numel())
        kernels.dequantise(codes, norms, SUM_BLOCK, bits, values)

    return Quantiser(encode, decode, num_bytes)


def make_qsgd(choice: Choice, rank: int) -> QsgdCodec:
    """The codec of `qsgd(...)` in a plan."""
    norm = cast(Literal["l2", "max"], choice["norm"])
    return QsgdCodec(int(choice["bits"]), int(choice["block"]), norm, rank=rank)
