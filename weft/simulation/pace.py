"""How fast a virtual rank computes from step to step, and how much of its time it was idle."""

from collections.abc import Callable, Iterable
from typing import final

from weft.distributed.group.clock import AbstractClock
from weft.training.events import Event, StepStarted, TrainingEnded, TrainingStarted

__all__ = ["Pace"]


@final
class Pace(AbstractClock):
    """A clock for computation that is slower in some steps, and a listener that counts steps.

    Steps are counted as this rank takes them. By the number of the global batch a fast rank, which takes several shares
    of one, would draw its luck once for all of them, and be fast again. Where a rank skips rounds that it is late for,
    the number is the round's: in a round it meets the same whichever it skipped before.

    A rank is idle where it neither computes nor lets a charge pass: it waits for others.

    Args:
        slowness: from (seed, number of the step) to how many times as long as usual the step takes.
        seeds: of the trainings that will be listened to, in order.
        skips_rounds: whether a rank takes at most one share of a batch, and leaves out those that it is late for.
    """

    def __init__(
        self,
        inner: AbstractClock,
        slowness: Callable[[int, int], float],
        seeds: Iterable[int],
        *,
        skips_rounds: bool = False,
    ) -> None:
        self._inner = inner
        self._skips_rounds = skips_rounds
        self._slowness = slowness
        self._seeds = iter(seeds)
        self._seed = self._num_steps = 0
        self._factor = 1.0
        self._began = self._busy = 0.0
        self.idle_shares: list[float] = []
        """Of each training, between its first step and its end."""

    def now(self) -> float:
        return self._inner.now()

    def charge(self, seconds: float) -> None:
        self._busy += seconds * self._factor
        self._inner.charge(seconds * self._factor)

    def wait_until(self, moment: float) -> None:
        self._inner.wait_until(moment)

    def listen(self, event: Event) -> None:
        match event:
            case TrainingStarted():
                self.begin(next(self._seeds))
            case StepStarted(progress):
                self.begin_step(progress.step)
            case TrainingEnded():
                self.end()
            case _:
                pass

    def begin(self, seed: int) -> None:
        self._seed, self._num_steps = seed, 0
        self._began, self._busy = self.now(), 0.0

    def begin_step(self, number: int) -> None:
        """The next step of this rank; `number` is that of the global batch."""
        self._factor = self._slowness(self._seed, number if self._skips_rounds else self._num_steps)
        self._num_steps += 1

    def end(self) -> None:
        passed = self.now() - self._began
        self.idle_shares.append(1 - self._busy / passed if passed else 0.0)
        self._factor = 1.0
