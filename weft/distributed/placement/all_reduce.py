"""Gradients averaged over ranks in buckets, while backward still runs.

backward   [layer 3][layer 2][layer 1]
bucket 0            =====>                       started as soon as its last gradient is there,
bucket 1                     =====>              in the same order on every rank
bucket 2                              ====>
update                                     [..]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.placement.buckets import Bucket, plan_buckets
from weft.errors import UsageError
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["AllReduceExchange", "BucketTimes"]


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket was started, when backward was over, and when the bucket was seen to be there; seconds of the
    rank's clock. A bucket that was there first ends before `waited`."""

    bucket: int
    started: float
    waited: float
    ended: float


@final
class AllReduceExchange:
    """Every rank leaves with the weighted sum of all gradients and makes the same update. One step after another:
    `begin`, `add` for every gradient as it is ready, `finish`.

    A gradient that is None travels as zeros, so that every rank sends the same messages.
    """

    def __init__(self, group: AbstractGroup, parameters: Mapping[str, Tensor]) -> None:
        self._group = group
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._buckets = plan_buckets(self._parameters)
        self._bucket_of = {name: i for i, bucket in enumerate(self._buckets) for name in bucket.names}
        self._packed = [self._pack_buffer(bucket) for bucket in self._buckets]
        self.spans: list[BucketTimes] = []
        self._exposed = 0.0
        self.begin(1.0)

    def begin(self, weight: float) -> None:
        """Start a step; this rank's gradients count with `weight` (all ranks' weights sum to 1)."""
        self._weight = weight
        self._gradients: dict[str, Tensor | None] = {}
        self._missing = [len(bucket.names) for bucket in self._buckets]
        self._messages: list[Tensor] = []
        self._works: list[tuple[AbstractWork, float]] = []
        self._ends: list[float] = []

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Start every bucket that is complete and whose turn it is."""
        self._gradients[name] = gradient
        self._missing[self._bucket_of[name]] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] == 0:
            self._start(len(self._works))
        self._note_ends()

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        total, sums = self.wait(loss)
        return total, update.apply(sums) if math.isfinite(total) else update.state

    def wait(self, loss: float = 0.0) -> tuple[float, dict[str, Tensor | None]]:
        """The sums of all losses and gradients; None for a parameter that had no part in any rank's loss."""
        for name in self._parameters:
            if name not in self._gradients:
                self.add(name, None)
        waited = self._group.clock.now()
        total, is_present = _report_loss(self._group, loss, self._gradients, list(self._parameters))
        sums = self._wait_for_all(waited)
        self._exposed = self._group.clock.now() - waited
        return total, {name: sums[name] if is_present[name] else None for name in self._parameters}

    def traffic(self) -> Traffic:
        """Buckets that travel side by side count once; the loss is waited for like a bucket."""
        hidden = _covered([(span.started, min(span.waited, span.ended)) for span in self.spans])
        return Traffic(self._exposed, hidden, sum(message.nbytes for message in self._messages))

    def _start(self, index: int) -> None:
        message = self._pack(index)
        # The mean over a power of two of ranks has the bits of the weighted sum, and saves equal shares a pass over
        # memory. The choice hangs on the size alone: all ranks must make the same, and weights differ among them.
        size = self._group.size
        is_mean = size & (size - 1) == 0
        factor = self._weight * size if is_mean else self._weight
        if factor != 1.0:
            message.mul_(factor)
        self._messages.append(message)
        started = self._group.clock.now()
        work = self._group.start(AllReduce(message, "mean" if is_mean else "sum"))
        self._works.append((work, started))

    def _note_ends(self) -> None:
        """Buckets end in the order they were started in. To ask is also what moves some groups on."""
        while len(self._ends) < len(self._works) and self._works[len(self._ends)][0].is_done():
            self._ends.append(self._group.clock.now())

    def _wait_for_all(self, waited: float) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        self.spans = []
        for index, (work, started) in enumerate(self._works):
            work.wait()
            ended = self._ends[index] if index < len(self._ends) else self._group.clock.now()
            self.spans.append(BucketTimes(index, started, waited, ended))
            sums |= self._unpack(self._buckets[index], self._messages[index])
        return sums

    def _pack_buffer(self, bucket: Bucket) -> Tensor | None:
        if len(bucket.names) == 1:
            return None
        return self._group.empty((bucket.num_elements,), self._parameters[bucket.names[0]].dtype)

    def _pack(self, index: int) -> Tensor:
        bucket, buffer = self._buckets[index], self._packed[index]
        gradients = [self._dense(name) for name in bucket.names]
        if buffer is None:
            return gradients[0]
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=buffer)
        return buffer

    def _dense(self, name: str) -> Tensor:
        gradient = self._gradients[name]
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"gradient is not dense ({name}: {gradient.layout}); build the embedding with sparse=False"
            )
        return torch.zeros_like(self._parameters[name]) if gradient is None else gradient.contiguous()

    def _unpack(self, bucket: Bucket, message: Tensor) -> dict[str, Tensor]:
        if len(bucket.names) == 1:
            return {bucket.names[0]: message}
        parts = message.split([self._parameters[name].numel() for name in bucket.names])
        return {name: part.view(self._parameters[name].shape) for name, part in zip(bucket.names, parts, strict=True)}


def _covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (9.0, 8.0)])
    4.0
    """
    total, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _report_loss(
    group: AbstractGroup, loss: float, gradients: Mapping[str, Tensor | None], names: list[str]
) -> tuple[float, dict[str, bool]]:
    """The sum of the losses, and which parameters had a part in the loss of at least one rank.

    Without the second a parameter that nobody used would get a gradient of zeros, and momentum would move it.
    """
    presence = [float(gradients.get(name) is not None) for name in names]
    report = torch.tensor([loss, *presence], dtype=torch.float64)
    group.all_reduce(report)
    total, *counts = report.tolist()
    return total, {name: count > 0 for name, count in zip(names, counts, strict=True)}
