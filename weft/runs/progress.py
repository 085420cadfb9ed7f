"""The progress of a run: a live bar on a terminal, a bounded number of lines anywhere else."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bars

from weft.report.quantity import format_duration, format_plain
from weft.training import events
from weft.training.events import Event, Listener

__all__ = ["use_progress"]

Clock = Callable[[], float]

REFRESH_SECONDS = 0.1
LINES_PER_TRAINING = 20
FIRST_LINE_SECONDS = 10.0
BESIDE_BAR = 74  # columns; two of them for the ^C that a terminal writes, which would otherwise break the line


@dataclass(frozen=True)
class ProgressView:
    """One training as it is shown."""

    label: str
    started: float  # clock, seconds
    first_samples: int  # more than 0 after a resume
    now: float
    samples: int
    total_samples: int
    step_samples: int = 0  # of the steps seen, and the seconds they took
    step_seconds: float = 0.0
    loss: float = math.nan
    evaluated: str = ""  # the last evaluation's first value that is not the loss
    reason: str = ""  # why it ended, once it has

    @property
    def fraction(self) -> float:
        return self.samples / self.total_samples if self.total_samples else 1.0

    @property
    def elapsed(self) -> float:
        return self.now - self.started

    @property
    def throughput(self) -> float:
        """Samples per second of the steps alone, as in the result."""
        return self.step_samples / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """At the pace since the start, evaluations and all else included; infinite before the first step."""
        done = self.samples - self.first_samples
        return (self.total_samples - self.samples) * self.elapsed / done if done else math.inf


def start(label: str, event: events.TrainingStarted, now: float) -> ProgressView:
    at = event.progress
    return ProgressView(label, now, at.samples, now, at.samples, at.total_samples)


def advance(snapshot: ProgressView, event: Event, now: float) -> ProgressView:
    """The snapshot after an event of the same training."""
    match event:
        case events.StepEnded(progress, result, seconds):
            return replace(
                snapshot,
                now=now,
                samples=progress.samples,
                step_samples=snapshot.step_samples + result.num_samples,
                step_seconds=snapshot.step_seconds + seconds,
                loss=result.loss,
            )
        case events.EvaluationEnded(_, _, evaluation):
            return replace(snapshot, now=now, evaluated=_leading_value(evaluation.values))
        case events.TrainingEnded(progress, reason):
            return replace(snapshot, now=now, samples=progress.samples, reason=reason)
        case _:
            return snapshot


def _leading_value(values: dict[str, float]) -> str:
    names = sorted(values, key=lambda name: name.endswith("loss"))  # stable: the loss last, else as given
    return f"{names[0].rpartition('/')[2]} {format_plain(values[names[0]])}" if names else ""


@contextmanager
def use_progress(
    console: Console, labels: Sequence[str], *, quiet: bool = False, clock: Clock = time.monotonic
) -> Iterator[Listener]:
    """A listener that shows the trainings of a run, one after the other, on this console; a quiet one shows notices."""
    if quiet:
        yield partial(print_notice, console)
        return
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainProgress(console, labels, clock)
        return
    bars = Bars(
        TextColumn("{task.description}"),
        BarColumn(bar_width=min(max(console.width - BESIDE_BAR, 8), 40)),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    )
    with bars:
        yield LiveProgress(bars, labels, clock)


def print_notice(console: Console, event: Event) -> None:
    if isinstance(event, events.Notice):
        console.print(f"note: {event.text}", soft_wrap=True)


def print_stage(console: Console, event: Event) -> None:
    if isinstance(event, events.Stage):
        console.print(event.text, soft_wrap=True)


class LiveProgress:
    """One bar per training."""

    def __init__(self, bars: Bars, labels: Sequence[str], clock: Clock) -> None:
        self._bars, self._labels, self._clock = bars, iter(labels), clock
        self._snapshot: ProgressView | None = None
        self._task = TaskID(0)
        self._drawn = -math.inf

    def __call__(self, event: Event) -> None:
        now = self._clock()
        print_notice(self._bars.console, event)
        print_stage(self._bars.console, event)
        if isinstance(event, events.TrainingStarted):
            self._snapshot = start(next(self._labels, "training"), event, now)
            self._task = self._bars.add_task(self._snapshot.label, total=1.0, numbers="")
        elif self._snapshot is not None:
            self._snapshot = advance(self._snapshot, event, now)
        # A step may take less time than drawing it.
        if self._snapshot is not None and (now - self._drawn >= REFRESH_SECONDS or self._snapshot.reason):
            self._drawn = now
            self._bars.update(self._task, completed=self._snapshot.fraction, numbers=bar_numbers(self._snapshot))


class PlainProgress:
    """A line for each twentieth of a training, for each evaluation, and whenever the time since the start has doubled:
    less than 40 lines for a day of training, besides the evaluations."""

    def __init__(self, console: Console, labels: Sequence[str], clock: Clock) -> None:
        self._console, self._labels, self._clock = console, iter(labels), clock
        self._snapshot: ProgressView | None = None
        self._next_mark = 0
        self._next_seconds = FIRST_LINE_SECONDS

    def __call__(self, event: Event) -> None:
        now = self._clock()
        print_notice(self._console, event)
        print_stage(self._console, event)
        if isinstance(event, events.TrainingStarted):
            self._snapshot = start(next(self._labels, "training"), event, now)
            self._next_seconds = FIRST_LINE_SECONDS
            self._plan_next_line(self._snapshot)
            self._print(f"{self._snapshot.label}  started, {event.num_parameters:,} parameters")
        elif self._snapshot is not None:
            self._snapshot = advance(self._snapshot, event, now)
            for line in self._lines(self._snapshot, event):
                self._print(line)

    def _lines(self, snapshot: ProgressView, event: Event) -> Iterator[str]:
        match event:
            case events.StepEnded():
                if _mark(snapshot) >= self._next_mark or snapshot.elapsed >= self._next_seconds:
                    self._plan_next_line(snapshot)
                    yield step_line(snapshot)
            case events.EvaluationEnded(progress, _, evaluation):
                values = "  ".join(f"{name} {format_plain(value)}" for name, value in evaluation.values.items())
                yield f"{snapshot.label}  epoch {progress.epoch:g}  {values}"
            case events.TrainingEnded(_, reason):
                yield f"{snapshot.label}  {reason} after {format_duration(snapshot.elapsed)}"

    def _plan_next_line(self, snapshot: ProgressView) -> None:
        self._next_mark = _mark(snapshot) + 1
        while self._next_seconds <= snapshot.elapsed:
            self._next_seconds *= 2

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


def _mark(snapshot: ProgressView) -> int:
    return int(snapshot.fraction * LINES_PER_TRAINING)


def bar_numbers(snapshot: ProgressView) -> str:
    """The text beside a bar: first how it goes, in the end why and when it ended."""
    parts = [f"loss {format_plain(snapshot.loss)}", f"{snapshot.throughput:,.0f} samples/s", snapshot.evaluated]
    if snapshot.reason:
        parts = [snapshot.evaluated, f"{snapshot.reason.partition(' (')[0]} after {format_duration(snapshot.elapsed)}"]
    else:
        parts.append(f"left {format_duration(snapshot.seconds_left)}")
    return "  ".join(part for part in parts if part)


def step_line(snapshot: ProgressView) -> str:
    return f"{snapshot.label}  {snapshot.fraction:4.0%}  {bar_numbers(snapshot)}"
