"""Ctrl-C: the first one asks, the second one insists."""

import signal
import threading

import pytest

from weft.records.record import Evaluation
from weft.training.events import (
    EpochEnded,
    EpochStarted,
    EvaluationEnded,
    EvaluationStarted,
    Event,
    Notice,
    Progress,
    StepEnded,
    StepResult,
    StepStarted,
    StopTraining,
    TrainingEnded,
    TrainingStarted,
)
from weft.training.interrupt import Interrupt, use_interrupt

PROGRESS = Progress(0, 0, 8, 0.0)
STEP_EVENTS = (StepStarted(PROGRESS), StepEnded(PROGRESS, StepResult(0.0, 0.1, 1), 0.0))
OTHER_EVENTS: tuple[Event, ...] = (
    TrainingStarted(PROGRESS, 1),
    EpochStarted(0),
    EvaluationStarted(PROGRESS, "validation"),
    EvaluationEnded(PROGRESS, "validation", Evaluation(0, 0, 0.0, 0.0, {})),
    EpochEnded(0),
    TrainingEnded(PROGRESS, "done"),
    Notice("x"),
)


@pytest.mark.parametrize("event", STEP_EVENTS, ids=lambda event: type(event).__name__)
def test_training_ends_at_a_step_once_asked_to(event: Event) -> None:
    interrupt = Interrupt()
    interrupt(event)
    interrupt.requested = True
    with pytest.raises(StopTraining, match="interrupted"):
        interrupt(event)


@pytest.mark.parametrize("event", OTHER_EVENTS, ids=lambda event: type(event).__name__)
def test_training_ends_nowhere_else(event: Event) -> None:
    interrupt = Interrupt()
    interrupt.requested = True
    interrupt(event)


def test_the_first_signal_asks_and_the_second_insists() -> None:
    with use_interrupt() as interrupt:
        before = interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert (before, interrupt.requested) == (False, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handler_from_before_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(LookupError), use_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
        raise LookupError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_that_may_not_have_signals_trains_without() -> None:
    found: list[bool] = []

    def train() -> None:
        with use_interrupt() as interrupt:
            found.append(interrupt.requested)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [False] and signal.getsignal(signal.SIGINT) is before
