"""Codecs of the kinds that are to come, as small as they get: the seam must hold for them too.

sign        not summable, gathered; one scale for each tensor; what was not sent is kept
sparse      messages of different lengths, which ranks tell each other first; what was not sent is kept
low rank    summable, in two rounds, the second of which depends on the first; matrices, not flat messages
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, Empty, Reduction, gather_encoded
from weft.distributed.group.calls import AllGather, AllReduce, ReduceOp
from weft.errors import EncodingError
from weft.planning.codec_cost import CodecCost

__all__ = ["LowRankCodec", "SignCodec", "SparseCodec"]


class Residuals:
    """What was not sent, by name."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def add_to(self, bucket: Bucket, message: Tensor) -> dict[str, Tensor]:
        return {n: t + self.kept.get(n, torch.zeros(())) for n, t in bucket.unpack(message).items()}

    def keep(self, wanted: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        self.kept |= {name: tensor - sent[name] for name, tensor in wanted.items()}


@final
class SignCodec(AbstractCodec):
    def __init__(self) -> None:
        self._residuals = Residuals()

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return False

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor:
        return empty((self._length(bucket),), torch.uint8)

    def encode(self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0) -> Tensor:
        wanted = self._residuals.add_to(bucket, message)
        scales = torch.stack([tensor.abs().mean() for tensor in wanted.values()]).to(torch.float32)
        signs = torch.cat([tensor.reshape(-1) >= 0 for tensor in wanted.values()]).to(torch.uint8)
        sent = torch.cat([scales.view(torch.uint8), signs])
        self._residuals.keep(wanted, bucket.unpack(self.decode(bucket, sent)))
        return sent if out is None else out.copy_(sent)

    def reduce(
        self, bucket: Bucket, sent: Tensor, size: int, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        return gather_encoded(self, bucket, sent, size, op, out)

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        if sent.numel() != self._length(bucket) or sent.dtype != torch.uint8:
            raise EncodingError("not signs", bucket.names[0])
        scales, signs = sent[: 4 * len(bucket.pieces)].clone().view(torch.float32), sent[4 * len(bucket.pieces) :]
        parts = [s * (2.0 * part.float() - 1) for s, part in zip(scales, signs.split(bucket.sizes), strict=True)]
        flat = torch.cat(parts).to(bucket.dtype)
        return flat if out is None else out.copy_(flat.view(out.shape))

    def memory(self) -> Mapping[str, Tensor]:
        return self._residuals.kept

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._residuals.kept = dict(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        return CodecCost(self._length(bucket), memory_bytes=bucket.num_bytes)

    def _length(self, bucket: Bucket) -> int:
        return 4 * len(bucket.pieces) + bucket.num_elements


@final
class SparseCodec(AbstractCodec):
    """Values above 1, as (place, value)."""

    def __init__(self) -> None:
        self._residuals = Residuals()

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return False

    def make_memory(self, bucket: Bucket, empty: Empty) -> None:
        return None

    def encode(self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0) -> Tensor:
        wanted = self._residuals.add_to(bucket, message)
        flat = torch.cat([tensor.reshape(-1) for tensor in wanted.values()])
        places = (flat.abs() > 1).nonzero().reshape(-1)
        sent = torch.stack([places.double(), flat[places].double()])
        self._residuals.keep(wanted, bucket.unpack(self.decode(bucket, sent)))
        return sent

    def reduce(
        self, bucket: Bucket, sent: Tensor, size: int, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        lengths = torch.zeros(size, 1, dtype=torch.int64)
        yield AllGather(lengths, torch.tensor([[sent.shape[1]]]))
        longest = int(lengths.max())
        padded = torch.zeros(1, 2, longest, dtype=sent.dtype)
        padded[0, :, : sent.shape[1]] = sent
        everyone = torch.zeros(size, 2, longest, dtype=sent.dtype)
        yield AllGather(everyone, padded)
        parts = [self.decode(bucket, e[:, :n]) for e, n in zip(everyone, lengths.reshape(-1).tolist(), strict=True)]
        total = sum(parts[1:], parts[0]) / (size if op == "mean" else 1)
        return total if out is None else out.copy_(total.view(out.shape))

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        if sent.dtype != torch.float64 or sent.ndim != 2:
            raise EncodingError("not places and values", bucket.names[0])
        flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype)
        flat[sent[0].long()] = sent[1].to(bucket.dtype)
        return flat if out is None else out.copy_(flat.view(out.shape))

    def memory(self) -> Mapping[str, Tensor]:
        return self._residuals.kept

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._residuals.kept = dict(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        return CodecCost(float("nan"), memory_bytes=bucket.num_bytes)  # what is sent depends on the values


@final
class LowRankCodec(AbstractCodec):
    """PowerSGD of rank 1 on the one matrix of a bucket: p = M q, then q = M' p / |p|, both added up over ranks."""

    def __init__(self) -> None:
        self._matrix = torch.zeros(1, 1)
        self._kept: dict[str, Tensor] = {}

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return True

    def make_memory(self, bucket: Bucket, empty: Empty) -> None:
        return None

    def encode(self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0) -> Tensor:
        (name,), (shape,) = bucket.names, bucket.shapes
        self._matrix = message.view(shape) + self._kept.get(name, torch.zeros(()))
        return self._matrix @ torch.ones(shape[1], dtype=bucket.dtype)

    def reduce(
        self, bucket: Bucket, sent: Tensor, size: int, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        yield AllReduce(sent)
        left = sent / sent.norm()
        right = self._matrix.T @ left
        self._kept[bucket.names[0]] = self._matrix - torch.outer(left, right)
        yield AllReduce(right)
        total = torch.outer(left, right) / (size if op == "mean" else 1)
        return total if out is None else out.copy_(total.view(out.shape))

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        raise EncodingError("one factor alone says nothing", bucket.names[0])

    def memory(self) -> Mapping[str, Tensor]:
        return self._kept

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._kept = dict(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        return CodecCost(sum(bucket.shapes[0]) * bucket.dtype.itemsize, memory_bytes=bucket.num_bytes)
