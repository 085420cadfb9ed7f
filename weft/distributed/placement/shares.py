"""Shares of a global batch by measured speed: ranks that are slower take fewer samples, and nobody waits for them.

                 equal                             measured
    rank 0   [compute====]......wait      [compute=========]        seconds per sample are measured on each rank, from
    rank 1   [compute====]......wait      [compute=========]        the beginning of its step to its last gradient, and
    rank 2   [compute===========]         [compute========]         told to all every so many steps

Sums stay exact, because each share counts by its samples, or its targets. Shares hang on the speeds alone, which are
whole numbers that all ranks have in common, and that are noted, so that a run can be repeated.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractGroup
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.sampling import span_by_speed

__all__ = ["MeasuredShares", "ShareLog", "Speeds", "measure_stages", "speeds_of"]

FASTEST = 1000
"""The speed of the fastest replica."""

NEWEST = 0.5
"""The part of the last measurement in the smoothed one: of a rank that slows, half is seen at once."""

ENTRY = "share/seconds"


@dataclass(frozen=True)
class Speeds:
    """Speeds of all replicas, the fastest 1000, by which batches are dealt from a step on."""

    step: int
    speeds: tuple[int, ...]


class ShareLog(Protocol):
    """Where speeds are noted, and where those of a run that is repeated come from."""

    def begin(self, step: int) -> Mapping[int, Speeds] | None:
        """A training goes on after so many steps. The speeds that were agreed on in the run that it repeats, by their
        steps; None where ranks are to measure."""

    def note(self, speeds: Speeds) -> None: ...


def speeds_of(seconds: Sequence[float]) -> tuple[int, ...]:
    """Relative speeds, of seconds per sample.

    >>> speeds_of([0.5, 1.0, 0.5]), speeds_of([0.0, 0.0])
    ((1000, 500, 1000), (1000, 1000))
    """
    fastest = min(seconds)
    return tuple(max(1, round(FASTEST * fastest / own)) if own > 0 else FASTEST for own in seconds)


@final
class MeasuredShares:
    """One rank's view: what it measures, and by which speeds batches are dealt.

    A step, as replicas drive it: `span`, `start`, `stop`, `end_step`.

    Args:
        mesh: where this rank stands; ranks of a replica take the same share, and the slowest of them counts.
        every: steps from one measurement to the next.
    """

    def __init__(self, mesh: Mesh, every: int, clock: AbstractClock, log: ShareLog | None = None) -> None:
        self._mesh = mesh
        self._every = every
        self._clock = clock
        self._log = log
        self.begin()

    def begin(self) -> None:
        """A training begins, with equal shares."""
        self._seconds: list[float] = []  # smoothed, of every replica
        self.speeds: tuple[int, ...] = (FASTEST,) * self._mesh.num_replicas
        self._step = 0
        self._recorded: Mapping[int, Speeds] | None = None
        self._has_begun = False
        self._forget()

    def _forget(self) -> None:
        self._measured: list[float] = []
        self._began: tuple[float, int] | None = None  # when, and with how many samples

    def span(self, length: int) -> slice:
        """The part of so many samples that is this replica's."""
        return span_by_speed(length, self._mesh.replica, self.speeds)

    def start(self, num_samples: int) -> None:
        """This rank begins to compute with so many samples."""
        self._began = self._clock.now(), num_samples

    def stop(self) -> None:
        """All gradients of this rank are there. What follows before the next start is not measured: it may have waited
        for others by then."""
        if self._began is not None and self._began[1]:
            began, num_samples = self._began
            self._measured.append((self._clock.now() - began) / num_samples)
        self._began = None

    def end_step(self, gather: Callable[[Tensor], Sequence[Tensor]]) -> None:
        """All ranks call it after every step.

        Args:
            gather: the tensor of every rank of the mesh, in their order.
        """
        if not self._has_begun:
            self._recorded, self._has_begun = self._log.begin(self._step) if self._log else None, True
        self._step += 1
        if self._recorded is not None:
            found = self._recorded.get(self._step)
            self.speeds = found.speeds if found else self.speeds
            return
        if self._step % self._every == 0:
            self._agree([float(own) for own in gather(torch.tensor(self._own_seconds(), dtype=torch.float64))])

    def _own_seconds(self) -> float:
        """The median, which a step that was held up by chance does not move; nan where there was no sample."""
        return statistics.median(self._measured) if self._measured else math.nan

    def _agree(self, of_ranks: Sequence[float]) -> None:
        num_replicas = self._mesh.num_replicas
        found = [0.0] * num_replicas
        for rank, seconds in enumerate(of_ranks):
            replica = self._mesh.seen_by(rank).replica
            found[replica] = math.nan if math.isnan(seconds) else max(found[replica], seconds)
        before = self._seconds or found
        smoothed = [
            own if math.isnan(new) else new if math.isnan(own) else (1 - NEWEST) * own + NEWEST * new
            for own, new in zip(before, found, strict=True)
        ]
        self._forget()
        if any(map(math.isnan, smoothed)):  # one has yet to take a sample
            return
        self._seconds = smoothed
        self.speeds = speeds_of(smoothed)
        if self._log is not None:
            self._log.note(Speeds(self._step, self.speeds))

    # Checkpoints.

    def memory(self) -> dict[str, Entry]:
        return {ENTRY: Entry(torch.tensor(self._seconds, dtype=torch.float64))} if self._seconds else {}

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        """Go on with what was measured, if it was of as many replicas."""
        self.begin()
        self._step = step
        found = entries.get(ENTRY)
        if found is not None and len(found.tensor) == self._mesh.num_replicas:
            self._seconds = found.tensor.tolist()
            self.speeds = speeds_of(self._seconds)


GRAIN = 0.05
"""Of relative speeds of stages: machines that are alike shall get the same stages in every run."""


def measure_stages(world: AbstractGroup, mesh: Mesh, work: Callable[[], object]) -> tuple[float, ...]:
    """Relative speeds of the ranks that hold the stages of a pipeline, the fastest 1; of a stage that several ranks
    hold, the slowest of them. For cuts of a model into stages that take as long. A collective call.

    Args:
        work: that every rank does, to be measured.
    """
    seconds = torch.tensor([_seconds_of(work, world.clock)], dtype=torch.float64)
    everyone = torch.empty(world.size, dtype=torch.float64)
    world.all_gather(everyone, seconds)
    stages = [0.0] * mesh.pipeline
    for rank, own in enumerate(everyone.tolist()):
        stage = mesh.seen_by(rank).coordinate("pipeline")
        stages[stage] = max(stages[stage], own)
    fastest = min(stages)
    return tuple(max(GRAIN, round(fastest / own / GRAIN) * GRAIN) if own > 0 else 1.0 for own in stages)


def _seconds_of(work: Callable[[], object], clock: AbstractClock) -> float:
    """The shortest of some times, after one that warms up."""
    found = []
    for _ in range(5):
        began = clock.now()
        work()
        found.append(clock.now() - began)
    return min(found[1:])
