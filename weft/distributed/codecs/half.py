"""Half precision: every number rounded to the nearest of 16 bits, ties to even; or by chance, without a bias.

             sign  exponent  fraction
    float32    1       8        23
    bf16       1       8         7      the range of float32, 3 digits less
    fp16       1       5        10      more digits, and nothing above 65504

Sums are made by the group, on native groups in 32 bits and rounded once. The widest float (float64) is rounded to
float32 first. Types of 16 bits and whole numbers are sent as they are.
"""

import math
from collections.abc import Mapping
from typing import Literal, cast, final

import torch
from torch import Tensor

from weft.distributed.codecs import kernels
from weft.distributed.codecs.codec import AbstractCodec, Kept, Reduction, malformed
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.packing import Bucket, Empty
from weft.distributed.codecs.reduction import add_encoded
from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.errors import EncodingError
from weft.planning.codec_cost import CodecCost, codec_cost
from weft.specs.plan import Choice

__all__ = ["HalfCodec", "make_bf16", "make_fp16", "round_by_chance"]

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CURES = {"fp16": "use compress=bf16", "bf16": "use compress=none"}


@final
class HalfCodec(AbstractCodec):
    """`compress=fp16` and `compress=bf16`."""

    def __init__(
        self, name: Literal["fp16", "bf16"], rounding: Literal["nearest", "stochastic"] = "nearest", *, rank: int = 0
    ) -> None:
        self._name = name
        self._counter = MessageCounter(rank) if rounding == "stochastic" else None

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return True

    @property
    def is_dense(self) -> bool:
        return True

    @property
    def carries_weights(self) -> bool:
        return True

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor:
        return empty((bucket.num_elements,), self._sent_as(bucket))

    @torch.no_grad()
    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        self._check_fits(bucket, message, share)
        scaled = message if scale == 1.0 else message * scale
        if self._counter is not None and self._sent_as(bucket) != bucket.dtype:
            scaled = round_by_chance(scaled, self._sent_as(bucket), self._counter.next_key(bucket))
        if out is None:
            return scaled.to(self._sent_as(bucket), copy=True)
        return out.view(message.shape).copy_(scaled)

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        return add_encoded(self, bucket, sent, op, out)

    @torch.no_grad()
    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        if sent.numel() != bucket.num_elements or sent.dtype != self._sent_as(bucket):
            raise malformed(bucket, sent)
        return sent.to(bucket.dtype) if out is None else out.copy_(sent.view(out.shape))

    def memory(self) -> Mapping[str, Kept]:
        return {} if self._counter is None else self._counter.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        if self._counter is not None:
            self._counter.remember(memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        is_sent_as_it_is = self._sent_as(bucket) == bucket.dtype
        return codec_cost("none" if is_sent_as_it_is else self._name, bucket.num_bytes, bucket.dtype.itemsize)

    def _sent_as(self, bucket: Bucket) -> torch.dtype:
        return TYPES[self._name] if bucket.dtype in (torch.float32, torch.float64) else bucket.dtype

    def _check_fits(self, bucket: Bucket, message: Tensor, share: float) -> None:
        """Finite numbers stay finite; what is not finite before is nobody's fault here."""
        if message.numel() == 0 or self._sent_as(bucket) == bucket.dtype:
            return
        if not self._overflows(message, share):
            return
        for name, tensor in bucket.unpack(message).items():
            if self._overflows(tensor, share):
                largest = float(tensor.abs().max()) / share
                limit = torch.finfo(TYPES[self._name]).max
                raise EncodingError(
                    f"value does not fit into {self._name} ({name}: {largest:.3g}, at most: {limit:.6g}); "
                    f"{CURES[self._name]}",
                    name,
                )

    def _overflows(self, tensor: Tensor, share: float) -> bool:
        """Whether the largest number is finite, and not so as 16 bits."""
        if tensor.numel() == 0 or not share:
            return False
        low, high = torch.aminmax(tensor)
        largest = max(-float(low), float(high)) / share
        rounded = torch.tensor(largest, dtype=torch.float64).to(TYPES[self._name])
        return math.isfinite(largest) and math.isinf(rounded.item())


def round_by_chance(tensor: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """One of the two numbers of 16 bits that are nearest, so that the mean is the number itself; as float32.

    >>> x = torch.full((1000,), 1 + 1 / 512)                  # a quarter of the way from 1 to the next of bf16
    >>> rounded = round_by_chance(x, torch.bfloat16, 7)
    >>> sorted(set(rounded.tolist())), abs(float((rounded - 1).mean()) * 512 - 1) < 0.2
    ([1.0, 1.0078125], True)
    """
    exact = tensor.float()
    nearest = exact.to(dtype)
    towards = torch.where(nearest.float() > exact, -math.inf, math.inf).to(dtype)
    other = torch.nextafter(nearest, towards)
    distance = (exact - nearest.float()).abs()
    step = (other.float() - nearest.float()).abs()
    draws = kernels.uniform(key, tensor.numel(), tensor.device).view(tensor.shape)
    moves = (draws * step < distance) & other.isfinite()
    return torch.where(moves, other, nearest).float()


def _make(name: Literal["fp16", "bf16"], choice: Choice, rank: int) -> HalfCodec:
    return HalfCodec(name, cast(Literal["nearest", "stochastic"], choice.get("round", "nearest")), rank=rank)


def make_fp16(choice: Choice, rank: int) -> HalfCodec:
    """The codec of `fp16` in a plan."""
    return _make("fp16", choice, rank)


def make_bf16(choice: Choice, rank: int) -> HalfCodec:
    """The codec of `bf16` in a plan."""
    return _make("bf16", choice, rank)
