"""The time a call takes: warm-up detected, repeated until the median is known, synchronised with the device.

    seconds     | w  w  w | s  s  s  s  s  s  s  s ...     every raw value is kept
                 num_warmup   steady -> median and interval

Each value is one call. For a call of less than about 10 microseconds the clock itself shows: time a loop of calls.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from weft.errors import UsageError, nearest
from weft.metrics.comparison import PairedComparison, compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import Summary, count_warmup, summarise

__all__ = [
    "Clock",
    "InterleavedTimings",
    "Timing",
    "TimingRule",
    "synchronise_device",
    "time_callable",
    "time_interleaved",
]

Clock = Callable[[], float]
"""Seconds from any origin."""

Order = Literal["random", "abba"]

_FIRST_CHECK = 10  # values
_CHECK_GROWTH = 1.1  # looking after every value would cost time and stop too often by luck


@dataclass(frozen=True)
class TimingRule:
    """When to stop: the whole width of the 95% interval of the median is at most `relative_width` of the median, or
    a budget is spent. At least one value is always taken."""

    relative_width: float = 0.05
    max_seconds: float = 10.0
    max_count: int = 10_000

    def __post_init__(self) -> None:
        if not (self.relative_width > 0 and self.max_seconds > 0 and self.max_count > 0):
            raise UsageError(f"timing rule needs positive numbers ({self})")


@dataclass(frozen=True)
class Timing:
    """Every value of one timed call, in order."""

    name: str
    seconds: tuple[float, ...]
    num_warmup: int
    stop_reason: str  # "interval reached", "time budget spent" or "count budget spent"

    @property
    def steady(self) -> tuple[float, ...]:
        """The values after the warm-up: what the summary is made of."""
        return self.seconds[self.num_warmup :]

    @property
    def summary(self) -> Summary:
        return summarise(self.steady)


@dataclass(frozen=True)
class InterleavedTimings:
    """Calls timed in turn. All share one warm-up, so value i of each was taken in the same round."""

    timings: Mapping[str, Timing]

    def speed_up(self, of: str, over: str) -> PairedComparison:
        """How many times faster `of` is than the base `over`, from the ratios within the rounds."""
        for name in (of, over):
            if name not in self.timings:
                raise UsageError(f"nothing of this name was timed ({name}); {nearest(name, self.timings)}")
        return compare_pairs(self.timings[over].steady, self.timings[of].steady, METRICS["wall_clock"])


def synchronise_device(device: torch.device | None = None) -> None:
    """Wait for the work queued on a device; a launch returns before it is done. The CPU has nothing queued.

    Args:
        device: by default the accelerator's current one, where it is in use. A process that computes on several devices
            passes a function of its own to what times.
    """
    if device is None and (accelerator := torch.accelerator.current_accelerator()) is not None:
        # A device that was never touched has no work, and to ask it would set it up.
        is_in_use = getattr(torch.get_device_module(accelerator), "is_initialized", lambda: True)()
        device = accelerator if is_in_use else None
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_callable(
    function: Callable[[], object],
    *,
    name: str = "",
    rule: TimingRule | None = None,
    clock: Clock = time.perf_counter,
    synchronise: Callable[[], None] = synchronise_device,
) -> Timing:
    """Time a call of no arguments again and again until `rule` is met.

    >>> timing = time_callable(lambda: sum(range(1000)), rule=TimingRule(max_count=20))
    >>> timing.summary.median > 0
    True
    """
    timings = time_interleaved({name: function}, rule=rule, clock=clock, synchronise=synchronise)
    return timings.timings[name]


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    *,
    order: Order = "random",
    seed: int = 0,
    rule: TimingRule | None = None,
    clock: Clock = time.perf_counter,
    synchronise: Callable[[], None] = synchronise_device,
) -> InterleavedTimings:
    """Time calls in turn, each once a round, until `rule` is met for all of them: what drifts, drifts for all.

    Args:
        order: within a round, shuffled anew ("random") or forwards and backwards by turns ("abba").
        rule: its budget of seconds is for all calls together, its count is of rounds.
    """
    if not functions:
        raise UsageError("nothing to time; give at least one function")
    rule = rule or TimingRule()
    generator = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    stop_reason, num_rounds, next_check = "", 0, _FIRST_CHECK
    started = clock()
    while not stop_reason:
        for name in _round_order(tuple(functions), order, num_rounds, generator):
            seconds[name].append(_time_once(functions[name], clock, synchronise))
        num_rounds += 1
        if num_rounds == next_check:
            next_check = math.ceil(num_rounds * _CHECK_GROWTH)
            stop_reason = "interval reached" if _is_reached(seconds, rule) else ""
        if not stop_reason and num_rounds >= rule.max_count:
            stop_reason = "count budget spent"
        if not stop_reason and clock() - started >= rule.max_seconds:
            stop_reason = "time budget spent"
    num_warmup = _shared_warmup(seconds)
    return InterleavedTimings(
        {name: Timing(name, tuple(values), num_warmup, stop_reason) for name, values in seconds.items()}
    )


def _time_once(function: Callable[[], object], clock: Clock, synchronise: Callable[[], None]) -> float:
    synchronise()
    started = clock()
    function()
    synchronise()
    return clock() - started


def _round_order(names: tuple[str, ...], order: Order, round_index: int, generator: random.Random) -> tuple[str, ...]:
    if order == "random":
        return tuple(generator.sample(names, len(names)))
    if order == "abba":
        return names if round_index % 2 == 0 else names[::-1]
    raise UsageError(f"unknown order ({order}); {nearest(order, get_args(Order))}")


def _shared_warmup(seconds: Mapping[str, list[float]]) -> int:
    return max(count_warmup(values) for values in seconds.values())


def _is_reached(seconds: Mapping[str, list[float]], rule: TimingRule) -> bool:
    num_warmup = _shared_warmup(seconds)
    return all(summarise(values[num_warmup:]).is_within(rule.relative_width) for values in seconds.values())
