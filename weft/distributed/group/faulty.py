"""A group that fails on purpose, at a given rank and call: delays, drops, deaths, slow ranks and slow links."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call, Send
from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractGroup, AbstractWork, DoneWork
from weft.distributed.group.recording import message_bytes

__all__ = ["Delay", "Drop", "Fault", "FaultyGroup", "Kill", "SlowLink", "SlowRank", "kill_this_process"]


@dataclass(frozen=True)
class Delay:
    """The rank is `seconds` late for its calls number `first_call` to `first_call + num_calls - 1`, counted from 0."""

    rank: int
    seconds: float
    first_call: int = 0
    num_calls: int = 1


@dataclass(frozen=True)
class Drop:
    """The rank believes that it made these calls, and never did: a lost message, or a silent peer."""

    rank: int
    first_call: int = 0
    num_calls: int = 1


@dataclass(frozen=True)
class Kill:
    """The rank dies instead of making a call: the one given, and the first after `seconds` on the clock."""

    rank: int
    at_call: int | None = None
    after_seconds: float | None = None


@dataclass(frozen=True)
class SlowLink:
    """The rank's messages to `peer` start later, by so many seconds per message and per byte."""

    rank: int
    peer: int
    seconds: float = 0.0
    seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class SlowRank:
    """Computation that is charged to the clock takes the rank `factor` times as long."""

    rank: int
    factor: float


Fault = Delay | Drop | Kill | SlowLink | SlowRank


def kill_this_process() -> NoReturn:
    """Die as a process does that runs out of memory: no clean-up, no goodbye."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


@final
class FaultyGroup(AbstractGroup):
    """Wraps any group and applies the faults of its own rank. `die` ends the rank, as its kind does.

    Calls are counted as they are started, from 0, split included. Time passes on the group's clock, so the same faults
    work in real and in virtual time.
    """

    def __init__(self, inner: AbstractGroup, faults: Sequence[Fault], *, die: Callable[[], NoReturn]) -> None:
        self._faults = tuple(fault for fault in faults if fault.rank == inner.rank)
        slow = [fault.factor for fault in self._faults if isinstance(fault, SlowRank)]
        clock = SlowClock(inner.clock, max(slow)) if slow else inner.clock
        super().__init__(inner.rank, inner.size, clock=clock, generation=inner.generation)
        self._inner = inner
        self._die = die
        self._num_calls = 0
        self._began = inner.clock.now()

    @property
    def inner(self) -> AbstractGroup:
        """The group that this one wraps."""
        return self._inner

    def start(self, call: Call) -> AbstractWork:
        if self._apply_faults(call):
            return DoneWork()
        return self._inner.start(call)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        """The part is not faulty: its ranks and calls are counted anew."""
        self._apply_faults(None)
        return self._inner.split(colour, key)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()

    def _apply_faults(self, call: Call | None) -> bool:
        """Wait or die as this call's faults ask; whether the call is dropped."""
        index = self._num_calls
        self._num_calls += 1
        late, dropped = 0.0, False
        for fault in self._faults:
            match fault:
                case Kill():
                    if fault.at_call == index or self._is_after(fault.after_seconds):
                        self._die()
                case Delay() if fault.first_call <= index < fault.first_call + fault.num_calls:
                    late += fault.seconds
                case Drop() if fault.first_call <= index < fault.first_call + fault.num_calls:
                    dropped = True
                case SlowLink() if isinstance(call, Send) and call.peer == fault.peer:
                    late += fault.seconds + fault.seconds_per_byte * message_bytes(call)
                case _:
                    pass
        if late:
            self._inner.clock.wait_until(self._inner.clock.now() + late)
        return dropped

    def _is_after(self, seconds: float | None) -> bool:
        return seconds is not None and self._inner.clock.now() - self._began >= seconds


@final
class SlowClock(AbstractClock):
    """The clock of a rank that computes slowly."""

    def __init__(self, inner: AbstractClock, factor: float) -> None:
        self._inner = inner
        self._factor = factor

    def now(self) -> float:
        return self._inner.now()

    def charge(self, seconds: float) -> None:
        self._inner.charge(seconds)
        self._inner.wait_until(self._inner.now() + (self._factor - 1) * seconds)

    def wait_until(self, moment: float) -> None:
        self._inner.wait_until(moment)
