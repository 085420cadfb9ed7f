"""Compression that turns itself off: of every bucket, whichever a measured link makes faster, as it is or top-k.

    as it is    2 (P - 1) / P n bytes over the link
    top-k       (P - 1) k pairs over the link, and passes over memory to find them, on every rank

Both are forecast once, when ranks meet, from a probe of the link and of memory that all have the same answer of.
Latencies are left out: a transport has its own ways with small messages, for which compression saves little.
"""

import time
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec, Kept, Reduction
from weft.distributed.codecs.exact import ExactCodec
from weft.distributed.codecs.links import link_of
from weft.distributed.codecs.packing import Bucket, Empty, Piece
from weft.distributed.codecs.topk import TopkCodec
from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.planning.cluster import Link
from weft.planning.codec_cost import CodecCost, codec_cost
from weft.planning.collective_cost import Algorithm, all_reduce_cost, collective_cost
from weft.planning.cost import estimate
from weft.specs.plan import Choice

__all__ = ["AutoCodec", "forecast_coded", "forecast_dense", "make_auto"]

LEAST_GAIN = 0.8
"""Of the time of a message as it is: a forecast may err, and a rank computes while messages travel."""

CALL_SECONDS = 3e-4
"""Of encoding and decoding a message, however small."""

PROBED_ELEMENTS = 1 << 24
"""More than caches hold."""
NUM_REPEATS = 5


def forecast_dense(num_bytes: float, size: int, link: Link) -> float:
    """Seconds of a message that is added up as it is, by a ring."""
    return estimate(all_reduce_cost(Algorithm("ring"), size, num_bytes), 0.0, link.beta)


def forecast_coded(cost: CodecCost, size: int, link: Link, memory_beta: float) -> float:
    """Seconds of a message that all ranks gather, encoding and decoding included.

    Args:
        cost: of the message.
        size: how many ranks there are.
        link: of the ranks.
        memory_beta: seconds to read or write a byte.
    """
    gathered = collective_cost("all_gather", size, size * cost.sent_bytes)
    return CALL_SECONDS + estimate(gathered, 0.0, link.beta) + cost.touched_bytes * memory_beta


@final
class AutoCodec(AbstractCodec):
    """`compress=auto(ratio)`, for synchronous ranks in a group.

    Args:
        ratio: of the elements that are sent where compression is on.
        rank: whose codec it is.
    """

    def __init__(self, ratio: float = 0.01, *, rank: int = 0) -> None:
        self._topk = TopkCodec(ratio, rank=rank)
        self._exact = ExactCodec()
        self._choice = Choice("topk", (("ratio", ratio),))
        self._chosen: dict[tuple[Piece, ...], AbstractCodec] = {}
        self._memory_beta: float | None = None
        self._kept: frozenset[str] = frozenset()  # names of tensors of which a part waits to be sent

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def is_summable(self) -> bool:
        return False

    def sends_as_it_is(self, bucket: Bucket) -> bool:
        return self._of(bucket) is self._exact

    def meet(self, bucket: Bucket, group: AbstractGroup) -> None:
        """Decide about a bucket. A collective call the first time. What waits to be sent since a checkpoint is sent the
        way it was."""
        if group.size == 1:
            self._chosen[bucket.pieces] = self._exact
            return
        if self._memory_beta is None:
            self._memory_beta = _probe_memory(group)
        cost = codec_cost(self._choice, bucket.num_bytes, bucket.dtype.itemsize)
        dense = forecast_dense(bucket.num_bytes, group.size, link_of(group))
        coded = forecast_coded(cost, group.size, link_of(group), self._memory_beta)
        is_on = coded < LEAST_GAIN * dense and bucket.dtype.is_floating_point
        self._chosen[bucket.pieces] = self._topk if is_on else self._exact
        self._go_on()

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor | None:
        return self._of(bucket).make_memory(bucket, empty)

    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        return self._of(bucket).encode(bucket, message, out, share=share, scale=scale)

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        return self._of(bucket).reduce(bucket, sent, group, op, out)

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        return self._of(bucket).decode(bucket, sent, out)

    def is_waiting(self, name: str) -> bool:
        return self._topk.is_waiting(name)

    def memory(self) -> Mapping[str, Kept]:
        return self._topk.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._topk.remember(memory)
        self._kept = frozenset(name.partition("/")[2] for name in memory)
        self._go_on()

    def cost(self, bucket: Bucket) -> CodecCost:
        return self._of(bucket).cost(bucket)

    def _go_on(self) -> None:
        """Send buckets of which a checkpoint holds something that waits the way they were sent. All ranks have the same
        names in it, whatever waits on each."""
        for pieces in self._chosen:
            if any(piece.name in self._kept for piece in pieces):
                self._chosen[pieces] = self._topk

    def _of(self, bucket: Bucket) -> AbstractCodec:
        return self._chosen.get(bucket.pieces, self._topk)


def _probe_memory(group: AbstractGroup) -> float:
    """Seconds for a byte of a tensor that is read or written, of the slowest rank. A collective call."""
    tensor = torch.zeros(PROBED_ELEMENTS, dtype=torch.float32)
    seconds = []
    for _ in range(NUM_REPEATS):
        began = time.perf_counter()
        tensor.mul_(1.0)
        seconds.append(time.perf_counter() - began)
    slowest = torch.tensor([sorted(seconds)[NUM_REPEATS // 2]], dtype=torch.float64)
    group.all_reduce(slowest, "max")
    return slowest.item() / (2 * tensor.nbytes)


def make_auto(choice: Choice, rank: int) -> AutoCodec:
    """The codec of `auto(...)` in a plan."""
    return AutoCodec(float(choice["ratio"]), rank=rank)
