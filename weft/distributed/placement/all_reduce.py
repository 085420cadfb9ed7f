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
from weft.distributed.placement.exchange import AbstractExchange, report_loss
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["AllReduceExchange", "Span"]


@dataclass(frozen=True)
class Span:
    """When a bucket was started, when the rank began to wait for it, and when it was there; seconds of its clock."""

    bucket: int
    started: float
    waited: float
    ended: float


@final
class AllReduceExchange(AbstractExchange):
    """Every rank leaves with the weighted sum of all gradients and makes the same update.

    A gradient that is None travels as zeros, so that every rank sends the same messages.
    """

    def __init__(self, group: AbstractGroup, parameters: Mapping[str, Tensor]) -> None:
        self._group = group
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._buckets = plan_buckets(self._parameters)
        self._bucket_of = {name: i for i, bucket in enumerate(self._buckets) for name in bucket.names}
        self._packed = [self._pack_buffer(bucket) for bucket in self._buckets]
        self.spans: list[Span] = []
        self.begin(1.0)

    def begin(self, weight: float) -> None:
        self._weight = weight
        self._gradients: dict[str, Tensor | None] = {}
        self._missing = [len(bucket.names) for bucket in self._buckets]
        self._messages: list[Tensor] = []
        self._works: list[tuple[AbstractWork, float]] = []

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Start every bucket that is complete and whose turn it is."""
        self._gradients[name] = gradient
        self._missing[self._bucket_of[name]] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] == 0:
            self._start(len(self._works))

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        total, sums = self.wait(loss)
        return total, update.apply(sums) if math.isfinite(total) else update.state

    def wait(self, loss: float = 0.0) -> tuple[float, dict[str, Tensor | None]]:
        """The sums of all losses and gradients; None for a parameter that had no part in any rank's loss."""
        for name in self._parameters:
            if name not in self._gradients:
                self.add(name, None)
        total, is_present = report_loss(self._group, loss, self._gradients, list(self._parameters))
        sums = self._wait_for_all()
        return total, {name: sums[name] if is_present[name] else None for name in self._parameters}

    def traffic(self) -> Traffic:
        exposed = sum(span.ended - span.waited for span in self.spans)
        hidden = sum(span.waited - span.started for span in self.spans)
        return Traffic(exposed, hidden, sum(message.nbytes for message in self._messages))

    def collect(self, state: OptimizerState) -> OptimizerState:
        return state

    def _start(self, index: int) -> None:
        message = self._pack(index)
        # The mean of a power of two of equal shares has the bits of the weighted sum, and saves a pass over memory.
        size = self._group.size
        is_exact_mean = self._weight * size == 1.0 and size & (size - 1) == 0
        if not is_exact_mean:
            message.mul_(self._weight)
        self._messages.append(message)
        started = self._group.clock.now()
        work = self._group.start(AllReduce(message, "mean" if is_exact_mean else "sum"))
        self._works.append((work, started))

    def _wait_for_all(self) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        self.spans = []
        for index, (work, started) in enumerate(self._works):
            waited = self._group.clock.now()
            work.wait()
            self.spans.append(Span(index, started, waited, self._group.clock.now()))
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
        return torch.zeros_like(self._parameters[name]) if gradient is None else gradient.contiguous()

    def _unpack(self, bucket: Bucket, message: Tensor) -> dict[str, Tensor]:
        if len(bucket.names) == 1:
            return {bucket.names[0]: message}
        parts = message.split([self._parameters[name].numel() for name in bucket.names])
        return {name: part.view(self._parameters[name].shape) for name, part in zip(bucket.names, parts, strict=True)}
