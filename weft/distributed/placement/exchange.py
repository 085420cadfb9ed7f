"""Gradients added up over ranks in buckets, while backward still runs.

backward   [layer 3][layer 2][layer 1]
bucket 0            =====>                       started as soon as its last gradient is there,
bucket 1                     =====>              in the same order on every rank
bucket 2                              ====>
update                                     [..]

    rank r    q(w_r g_r)  --.
                            +--> q( sum_r q(w_r g_r) )     q: the codec's rounding, which `none` has not
    others    ...         --'

Who gets which part of a sum is for a reducer to say (reducers.py). Weights whose gradients are kept as factors travel
as rows, each in its place among the buckets (factors/exchange.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, ExactCodec
from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.recording import handed_bytes, wire_bytes
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.placement.factors.exchange import FactorExchange, PendingProduct
from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.placement.reducers import AbstractReducer, AllReducer, PendingSum
from weft.errors import EncodingError, PlanError, UsageError
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["BucketTimes", "GradientExchange"]

MOST_ELEMENTS = 2**31 - 1
"""Of a message whose numbers are known by their places, which have 32 bits."""

MOST_UNDER_WAY = 2
"""Messages, where memory is scarce: one is added up while backward fills the next."""


@dataclass(frozen=True)
class BucketTimes:
    """When a bucket was started, when backward was over, and when the bucket was seen to be there; seconds of the
    rank's clock. A bucket that was there first ends before `waited`."""

    bucket: int
    started: float
    waited: float
    ended: float


def check_sizes(buckets: Sequence[Bucket]) -> None:
    """Refuse tensors that are too large for a codec that counts places."""
    for bucket in buckets:
        if bucket.num_elements > MOST_ELEMENTS:
            about = f"{', '.join(bucket.names)}: {bucket.num_elements} numbers, at most: {MOST_ELEMENTS}"
            raise PlanError(f"tensor is too large for this compression ({about}); use compress=bf16, or split it")


@final
class GradientExchange:
    """Every rank leaves with the weighted sums of gradients that it updates with: of all, or of its own pieces. One
    step after another: `begin`, `add` for every gradient as it is ready, `finish`.

    A gradient that is None travels as zeros, so that every rank sends the same messages. A parameter of which every
    rank has none is left out of the sums, unless a codec has kept a part of an earlier gradient: then zeros they are.

    Args:
        group: one rank of every replica.
        world: all ranks, whose losses are added up; by default those of the group.
        codec: what is sent instead of gradients; by default they are.
        reducer: by default every rank gets every sum, of buckets of small gradients that are neighbours.
        group_of: the ranks that add up a parameter's gradients; by default all of the group.
        factors: layers whose gradients of weights may come as rows.
        is_part: whether this rank has a part of a parameter. Where a codec weighs numbers of a message against each
            other, parts do not travel with what several ranks of a replica have alike: these would be sent other sums.
    """

    def __init__(
        self,
        group: AbstractGroup,
        parameters: Mapping[str, Tensor],
        codec: AbstractCodec | None = None,
        *,
        world: AbstractGroup | None = None,
        reducer: AbstractReducer | None = None,
        group_of: Callable[[str], AbstractGroup] | None = None,
        factors: FactoredLayers | None = None,
        is_part: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._group = group
        self._world = world or group
        self._codec = codec or ExactCodec()
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        own_group = group_of or (lambda name: group)
        has_factors = factors is not None and bool(factors.weights)
        self._factored = FactorExchange(group, factors) if factors is not None and has_factors else None
        self.made = frozenset(self._factored.names if self._factored else ())
        """Parameters whose sums are tensors of their own, which nobody writes to again."""
        assert not (has_factors and reducer), "every rank multiplies the rows of all"
        key = partial(_travels_with, own_group, self.made, is_part if not self._codec.is_dense else lambda name: False)
        self._buckets = plan_buckets(self._parameters, key=key) if reducer is None else reducer.buckets
        self._groups = [own_group(bucket.names[0]) for bucket in self._buckets]
        self._reducer = reducer or AllReducer(self._groups, self._codec, self._buckets)
        is_coded = not self._codec.is_exact or has_factors
        self._dense_bytes = sum(bucket.num_bytes for bucket in self._buckets) if is_coded else 0
        if not self._codec.is_dense:
            check_sizes(self._buckets)
        self._bucket_of = {name: i for i, bucket in enumerate(self._buckets) for name in bucket.names}
        self._keeps_whole = self._reducer.keeps_whole
        self._packed = [self._make_memory(bucket) if self._keeps_whole else None for bucket in self._buckets]
        self.spans: list[BucketTimes] = []
        self.keeps_sums = False
        """Gradients may hold sums of earlier steps, the same on all ranks, which come out as they were: in every group
        weights sum to 1, be it one of more ranks than there are replicas."""
        self.present: set[str] = set()
        """Parameters that had a part in the loss of some rank, in the last step."""
        self._exposed = self._waited = 0.0
        self.begin(1.0)

    def begin(self, weight: float | None) -> None:
        """Start a step; this rank's gradients count with `weight` (all ranks' weights sum to 1), or all alike in the
        mean over the ranks that add them up."""
        self._weight = weight
        self._gradients: dict[str, Tensor | None] = {}  # that are not on their way
        self._given: set[str] = set()  # names of gradients that were not None
        self._missing = [len(bucket.names) for bucket in self._buckets]
        self._num_bytes = self._wire_bytes = 0
        self._coding = 0.0
        self._works: list[tuple[PendingSum | None, float]] = []  # None of one whose sum is in `_totals`
        self._totals: list[Tensor] = []
        self._unfit: dict[str, EncodingError] = {}  # by parameter
        self._ends: list[float] = []
        self._products: dict[str, PendingProduct] = {}  # of weights that come as rows
        self._beside: set[str] = set()  # weights of which this rank has more than rows
        if self._factored is not None:
            self._factored.begin()

    def add(self, name: str, gradient: Tensor | None, *, is_kept: bool = False) -> None:
        """Start every bucket that is complete and whose turn it is.

        Args:
            gradient: of a weight that comes as rows, what there is beside them.
            is_kept: that is a sum of earlier steps, the same on all ranks.
        """
        if self._factored is not None:
            self._factored.announce(self._weight_of(0))
        if name in self.made and gradient is not None and not is_kept:
            self._beside.add(name)
        self._gradients[name] = gradient
        if gradient is not None or self._codec.is_waiting(name):  # what is sent of an earlier one must be used
            self._given.add(name)
        self._missing[self._bucket_of[name]] -= 1
        while self._may_start(len(self._works)):
            self._start(len(self._works))
        self._note_ends()

    def _may_start(self, index: int) -> bool:
        """Backward does not wait for the others to say how many rows they have."""
        if index == len(self._buckets) or self._missing[index]:
            return False
        return self._factored is None or self._buckets[index].names[0] not in self.made or self._factored.is_agreed()

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        total, sums = self.wait(loss)
        return total, update.apply(sums) if math.isfinite(total) else update.state

    def wait(self, loss: float = 0.0) -> tuple[float, dict[str, Tensor | None]]:
        """The sum of all losses, and those of gradients that come to this rank; None for a parameter that had no part
        in any rank's loss.

        Raises:
            EncodingError: on all ranks, if a value of one did not fit.
        """
        started = {name for bucket in self._buckets[: len(self._works)] for name in bucket.names}
        for name in self._parameters:
            if name not in self._gradients and name not in started:
                self.add(name, None)
        waited = self._group.clock.now()
        for index in range(len(self._works), len(self._buckets)):
            self._start(index)
        total, is_present, unfit = self._report(loss)
        self.present = {name for name, found in is_present.items() if found}
        coding = self._coding
        sums = self._wait_for_all(waited)
        self._exposed = self._group.clock.now() - waited
        self._waited = self._exposed - (self._coding - coding)  # for messages, not for the decoding of them
        if unfit and math.isfinite(total):
            raise self._unfit.get(unfit[0]) or EncodingError(_text_of_unfit(unfit[0]), unfit[0])
        return total, {name: sums[name] if is_present[name] else None for name in self._parameters if name in sums}

    def traffic(self) -> Traffic:
        """Buckets that travel side by side count once; the loss is waited for like a bucket."""
        hidden = _covered([(span.started, min(span.waited, span.ended)) for span in self.spans])
        num_bytes, on_wire = self._num_bytes, self._wire_bytes
        if self._factored is not None:
            num_bytes, on_wire = num_bytes + self._factored.num_bytes, on_wire + self._factored.wire_bytes
        traffic = Traffic(self._exposed, hidden, num_bytes, wire_bytes=on_wire)
        if not self._dense_bytes:
            return traffic
        under_way, dense = hidden + max(self._waited, 0.0), self._dense_bytes
        return replace(traffic, coding=self._coding, under_way=under_way, dense_bytes=dense, payload_bytes=num_bytes)

    def memory(self) -> list[Tensor]:
        """That it has now: of messages, sums, and gradients that wait for others of their bucket."""
        waiting = [gradient for gradient in self._gradients.values() if gradient is not None]
        kept = [memory for memory in self._packed if memory is not None]
        rows = self._factored.memory() if self._factored else []
        return [*kept, *waiting, *rows, *self._totals, *self._reducer.memory()]

    def _start(self, index: int) -> None:
        while not self._keeps_whole and len(self._works) - len(self._totals) >= MOST_UNDER_WAY:
            self._collect()
        bucket, codec = self._buckets[index], self._codec
        if bucket.names[0] in self.made:
            self._start_product(index, bucket.names[0])
            return
        dense = {name: self._dense(name, shape) for name, shape in zip(bucket.names, bucket.shapes, strict=True)}
        packed = self._packed[index] if self._keeps_whole else self._make_memory(bucket)
        message = dense[bucket.names[0]] if packed is None else bucket.pack(dense, packed)
        del dense
        # The mean over a power of two of ranks has the bits of the weighted sum, and saves equal shares a pass over
        # memory. The choice hangs on the size alone: all ranks must make the same, and weights differ among them. What
        # is rounded is the weighted gradient: a sum of those that are not weighted may not fit where each of them does.
        size = self._groups[index].size
        as_it_is = codec.sends_as_it_is(bucket)
        is_mean = as_it_is and size & (size - 1) == 0
        weight = self._weight_of(index)
        if as_it_is and (factor := weight * size if is_mean else weight) != 1.0:
            message.mul_(factor)
        began = self._group.clock.now()
        sent = self._encode(index, message, weight)
        started = self._group.clock.now()
        self._coding += started - began
        pending = self._reducer.start(index, sent, "mean" if is_mean else "sum", message)
        self._works.append((pending, started))

    def _start_product(self, index: int, name: str) -> None:
        assert self._factored is not None, "of weights that come as rows"
        started = self._group.clock.now()
        pending = self._products[name] = self._factored.start(name, self._weight_of(index))
        if pending.num_rows:
            self._given.add(name)
        if pending.num_surplus:
            self._beside.add(name)
        self._works.append((pending, started))

    def _add_beside(self, names: set[str]) -> None:
        """Give every product the sum that it is added to: the one that all ranks have, or, of these weights, that of
        all ranks."""
        for name, pending in self._products.items():
            held = self._gradients.pop(name)
            if name in names:
                like = self._parameters[name]
                held = torch.zeros_like(like, requires_grad=False) if held is None else held.contiguous()
                held.mul_(self._weight_of(self._bucket_of[name]))
                pending.add_surplus(held)
                call = AllReduce(held)
                self._num_bytes += handed_bytes(call)
                self._wire_bytes += wire_bytes(call, self._group.rank, self._group.size)
                self._group.run(call)
            pending.base = held

    def _weight_of(self, index: int) -> float:
        size = self._groups[index].size
        if self._weight is None:
            return 1 / size
        return self._weight * self._group.size / size if self.keeps_sums else self._weight

    def _encode(self, index: int, message: Tensor, weight: float) -> Sequence[Tensor]:
        """The weighted message, which an exact codec is given as such. One with a value that does not fit is sent all
        the same, as the others wait for one: all are told."""
        share, scale = (weight, 1.0) if self._codec.sends_as_it_is(self._buckets[index]) else (1.0, weight)
        try:
            return self._reducer.encode(index, message, share=share, scale=scale)
        except EncodingError as error:
            self._unfit[error.name] = error
            return self._reducer.encode(index, message.zero_(), share=1.0, scale=1.0)

    def _report(self, loss: float) -> tuple[float, dict[str, bool], list[str]]:
        """The sum of the losses, which parameters had a part in the loss of at least one rank, and of which a value did
        not fit.

        Without the second a parameter that nobody used would get a gradient of zeros, and momentum would move it.
        """
        names = list(self._parameters)
        numbers = [float(name in self._given) for name in names]
        if self._factored is not None:
            numbers += [float(name in self._beside) for name in self._factored.names]
        if not self._codec.is_exact:
            numbers += [float(name in self._unfit) for name in names]
        report = torch.tensor([loss, *numbers], dtype=torch.float64)
        self._group.all_reduce(report)
        total, *counts = report.tolist()
        if self._world is not self._group:
            losses = torch.tensor([loss], dtype=torch.float64)
            self._world.all_reduce(losses)
            total = losses.item()
        is_present = {name: count > 0 for name, count in zip(names, counts, strict=False)}
        counts = counts[len(names) :]
        if self._factored is not None:
            self._add_beside({name for name, count in zip(self._factored.names, counts, strict=False) if count})
            counts = counts[len(self._factored.names) :]
        return total, is_present, [n for n, count in zip(names, counts, strict=False) if count]

    def _note_ends(self) -> None:
        """Buckets end in the order they were started in. To ask is also what moves some groups on."""
        while len(self._ends) < len(self._works):
            work = self._works[len(self._ends)][0]
            assert work is not None, "those that were collected have ended"
            if not work.is_done():
                return
            self._ends.append(self._group.clock.now())
            if not self._keeps_whole:
                self._collect()

    def _collect(self) -> None:
        """The oldest sum that is under way; its message is let go."""
        index = len(self._totals)
        work, started = self._works[index]
        assert work is not None, "collected once"
        self._totals.append(work.wait())
        self._coding += work.computed
        self._num_bytes += work.num_bytes
        self._wire_bytes += work.wire_bytes
        if len(self._ends) == index:
            self._ends.append(self._group.clock.now())
        self._works[index] = (None, started)

    def _wait_for_all(self, waited: float) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        self.spans = []
        for index, (_, started) in enumerate(self._works):
            if index == len(self._totals):
                self._collect()
            self.spans.append(BucketTimes(index, started, waited, self._ends[index]))
            sums |= self._reducer.unpack(index, self._totals[index])
        self._totals = []
        return sums

    def _make_memory(self, bucket: Bucket) -> Tensor | None:
        """None for a tensor that travels alone, in its own."""
        return bucket.make_memory(self._group.empty) if len(bucket.pieces) > 1 else None

    def _dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        gradient = self._gradients.pop(name)
        if gradient is not None and gradient.layout is not torch.strided:
            raise UsageError(
                f"gradient is not dense ({name}: {gradient.layout}); build the embedding with sparse=False"
            )
        if gradient is not None:
            return gradient.contiguous()
        like = self._parameters[name]
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _travels_with(
    group_of: Callable[[str], AbstractGroup], alone: frozenset[str], is_part: Callable[[str], bool], name: str
) -> tuple[object, str, bool]:
    return group_of(name), name if name in alone else "", is_part(name)


def _text_of_unfit(name: str) -> str:
    return f"value of another rank does not fit ({name}); use compress=bf16, or none"


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
