"""Metrics for a loop that a user already has: `with measure("forward"): ...`, `for batch in measured(loader): ...`.

for batch in measured(loader):     | data_wait | step_time | data_wait | step_time | ...
    step(batch)                    throughput = samples / (data_wait + step_time)
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.metrics.metric import find_metric
from weft.metrics.statistics import Summary, count_warmup, summarise
from weft.metrics.timing import Clock, synchronise_device
from weft.records.record import Repetition
from weft.records.record_file import new_record, write_record

__all__ = ["MeasuredLoop", "Measurements", "SeriesSummary", "count_samples", "measure", "measured", "measurements"]

CLOCK_RULES = "every block and step from its start to its end, device synchronised at both; warm-up kept in the series"

T = TypeVar("T")


@dataclass(frozen=True)
class SeriesSummary:
    """One measured series. The median and its interval leave the detected warm-up out; `overall` does not."""

    name: str
    unit: str
    num_warmup: int
    steady: Summary
    overall: float  # the sum of a time; all samples over all seconds of a throughput


@dataclass(frozen=True)
class _Step:
    data_wait: float
    step_time: float
    num_samples: int | None

    @property
    def seconds(self) -> float:
        return self.data_wait + self.step_time


class Measurements:
    """Named series of seconds. Each instance keeps its own and shares nothing.

    >>> mine = Measurements()
    >>> with mine.measure("forward"):
    ...     _ = torch.ones(10).sum()
    >>> for batch in mine.measured([torch.ones(4, 2), torch.ones(3, 2)], "train"):
    ...     _ = batch.sum()
    >>> sorted(mine.series)
    ['forward/wall_clock', 'train/data_wait', 'train/step_time', 'train/throughput']
    """

    def __init__(
        self,
        name: str = "measurements",
        *,
        clock: Clock = time.perf_counter,
        synchronise: Callable[[], None] = synchronise_device,
    ) -> None:
        self.name = name
        self._clock = clock
        self._synchronise = synchronise
        self._blocks: dict[str, list[float]] = {}
        self._loops: dict[str, list[_Step]] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time a block, or as a decorator every call. A block that raises is not recorded."""
        started = self.now()
        yield
        self._blocks.setdefault(name, []).append(self.now() - started)

    def measured(
        self, batches: Iterable[T], name: str = "loop", *, num_samples: int | Callable[[T], int] | None = None
    ) -> "MeasuredLoop[T]":
        """The same batches, with the wait for each and the step on each timed.

        Args:
            num_samples: of each batch, or a function of the batch; by default what `count_samples` finds.
        """

        def count(batch: T) -> int | None:
            if num_samples is None:
                return count_samples(batch)
            return num_samples(batch) if callable(num_samples) else num_samples

        return MeasuredLoop(batches, count, self.now, lambda step: self._loops.setdefault(name, []).append(step))

    def now(self) -> float:
        """The clock, once the device has done all it was given."""
        self._synchronise()
        return self._clock()

    def clear(self) -> None:
        """Forget everything measured so far."""
        self._blocks.clear()
        self._loops.clear()

    @property
    def series(self) -> dict[str, tuple[float, ...]]:
        """Every raw value, by `name/metric`; each metric is one of METRICS."""
        found = {f"{name}/wall_clock": tuple(seconds) for name, seconds in self._blocks.items()}
        for name, steps in self._loops.items():
            found[f"{name}/data_wait"] = tuple(step.data_wait for step in steps)
            found[f"{name}/step_time"] = tuple(step.step_time for step in steps)
            if counted := _counted(steps):
                found[f"{name}/throughput"] = tuple(samples / seconds for samples, seconds in counted)
        return found

    def summaries(self) -> tuple[SeriesSummary, ...]:
        """One summary a series."""
        return tuple(self._summarise(name, values) for name, values in self.series.items())

    def table(self) -> str:
        """The summaries as plain text.

        >>> print(Measurements().table())
        series  values  warm-up  median  95% interval  overall  unit
        """
        rows = [("series", "values", "warm-up", "median", "95% interval", "overall", "unit")]
        for one in self.summaries():
            values = (f"{one.steady.median:.4g}", str(one.steady.interval), f"{one.overall:.4g}")
            rows.append((one.name, str(one.steady.count), str(one.num_warmup), *values, one.unit))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(cells).rstrip() for cells in padded)

    def save(self, folder: Path | str) -> None:
        """Write a run folder for `weft show` and `weft compare`: every series, and one value for each.

        The value of a time is its median, that of a throughput its overall rate.
        """
        if not self.series:
            raise UsageError("nothing was measured; use measure() or measured() before save()")
        values = {s.name: s.overall if s.unit.endswith("/s") else s.steady.median for s in self.summaries()}
        repetition = Repetition(
            seed=torch.initial_seed(),
            status="done",
            stop_reason="measured in a loop of the user's own",
            data_checksum="",
            values=values,
            series=self.series,
        )
        record = new_record(self.name)
        write_record(Path(folder), dataclasses.replace(record, clock_rules=CLOCK_RULES, repetitions=(repetition,)))

    def _summarise(self, name: str, values: Sequence[float]) -> SeriesSummary:
        num_warmup = count_warmup(values)
        loop, _, metric = name.rpartition("/")
        overall = sum(values)
        if metric == "throughput":
            samples, seconds = zip(*_counted(self._loops[loop]), strict=True)
            overall = sum(samples) / sum(seconds)
        return SeriesSummary(name, find_metric(metric).unit, num_warmup, summarise(values[num_warmup:]), overall)


class MeasuredLoop(Generic[T]):
    """Batches that time themselves. Can be iterated again for every epoch; has a length where the batches have one.

    A step ends when the next batch is asked for, so one that raises or breaks out of the loop is not recorded.
    """

    def __init__(
        self,
        batches: Iterable[T],
        count: Callable[[T], int | None],
        now: Clock,
        note: Callable[[_Step], None],
    ) -> None:
        self._batches = batches
        self._count = count
        self._now = now
        self._note = note

    def __iter__(self) -> Iterator[T]:
        began = self._now()
        for batch in self._batches:
            num_samples = self._count(batch)
            ready = self._now()
            yield batch
            ended = self._now()
            self._note(_Step(ready - began, ended - ready, num_samples))
            began = ended

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError(f"{type(self._batches).__name__} has no length")
        return len(self._batches)


def count_samples(batch: object) -> int | None:
    """The size of dimension 0 of the first tensor (or array) in a batch, however nested; None if there is none.

    >>> count_samples({"x": [torch.ones(4, 2)], "y": torch.ones(4)}), count_samples("no tensor")
    (4, None)
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    inside: Iterable[object] = ()
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, (list, tuple)):
        inside = batch
    elif dataclasses.is_dataclass(batch):
        inside = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return next((count for item in inside if (count := count_samples(item)) is not None), None)


def _counted(steps: Iterable[_Step]) -> list[tuple[int, float]]:
    """Samples and seconds of the steps whose number of samples is known."""
    return [(s.num_samples, s.seconds) for s in steps if s.num_samples is not None and s.seconds > 0]


measurements = Measurements()
"""The one that `weft.measure` and `weft.measured` write to. Make a `Measurements` of your own to keep things apart."""

measure = measurements.measure
measured = measurements.measured
