"""The pace of a virtual rank: slower in some steps, and idle where it waits."""

import pytest

from tests.simulation.test_computation import CountingClock
from weft.simulation.pace import Pace
from weft.training.events import Progress, StepStarted, TrainingEnded, TrainingStarted


def at(step: int) -> Progress:
    return Progress(step, 0, 0, 0.0)


def test_a_step_takes_as_long_as_its_seed_and_number_say() -> None:
    clock = CountingClock()
    pace = Pace(clock, lambda seed, step: 10.0 * seed + step, [1, 2])
    moments = []
    for _ in range(2):
        pace.listen(TrainingStarted(at(0), 0))
        for step in range(2):
            pace.listen(StepStarted(at(step)))
            pace.charge(1.0)
            moments.append(pace.now())
        pace.listen(TrainingEnded(at(2), ""))
    assert moments == [10.0, 21.0, 41.0, 62.0]
    pace.charge(1.0)
    assert clock.now() == 63.0, "what comes after training is not slowed"


@pytest.mark.parametrize(("skips_rounds", "expected"), [(False, [0, 1, 2, 3, 0, 1]), (True, [0, 1, 4, 9, 2, 3])])
def test_no_draw_is_used_twice(skips_rounds: bool, expected: list[int]) -> None:
    """By the number of the global batch, a fast rank that took several shares of one reused its fast draw for all:
    of "1 in 5 steps 5x slower" asynchronous ranks met 14.5% slow steps, synchronous ones 22.2%."""
    asked: list[int] = []

    def slowness(seed: int, step: int) -> float:
        asked.append(step)
        return 1.0

    pace = Pace(CountingClock(), slowness, [0, 1], skips_rounds=skips_rounds)
    for batches in ((0, 1, 4, 9), (2, 3)) if skips_rounds else ((0, 0, 0, 2), (5, 5)):
        pace.listen(TrainingStarted(at(0), 0))
        for batch in batches:
            pace.listen(StepStarted(at(batch)))
        pace.listen(TrainingEnded(at(2), ""))
    assert asked == expected


def test_idle_is_what_is_neither_computed_nor_charged() -> None:
    clock = CountingClock()
    pace = Pace(clock, lambda seed, step: 2.0, [0, 1])
    for waited in (12.0, 40.0):
        pace.listen(TrainingStarted(at(0), 0))
        pace.listen(StepStarted(at(0)))
        pace.charge(4.0)
        pace.wait_until(clock.now() + waited - 8.0)
        pace.listen(TrainingEnded(at(1), ""))
        pace.charge(100.0)
    assert pace.idle_shares == pytest.approx([1 / 3, 0.8])


def test_a_training_that_takes_no_time_is_not_idle() -> None:
    pace = Pace(CountingClock(), lambda seed, step: 1.0, [0])
    pace.listen(TrainingStarted(at(0), 0))
    pace.listen(TrainingEnded(at(0), ""))
    assert pace.idle_shares == [0.0]
