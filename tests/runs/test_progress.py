"""Progress: a bar on a terminal, few lines elsewhere, and always the same numbers."""

import io
import math
import re
from collections.abc import Iterator
from itertools import count

import pytest
from rich.console import Console

from weft.records.record import Evaluation
from weft.runs.progress import LINES_PER_TRAINING, ProgressView, advance, bar_numbers, start, use_progress
from weft.training import events
from weft.training.events import Event, Progress, StepResult

TOTAL = 1000


def at(samples: int) -> Progress:
    return Progress(samples // 10, samples, TOTAL, samples / 500)


def step(samples: int, loss: float = 0.5, seconds: float = 0.1) -> Event:
    return events.StepEnded(at(samples), StepResult(loss, 0.1, 10), seconds)


def evaluation(samples: int, values: dict[str, float]) -> Event:
    return events.EvaluationEnded(at(samples), "validation", Evaluation(1, samples, 1.0, 1.0, values))


def training(first: int = 0, every: int = 10) -> Iterator[Event]:
    """A whole training, ten samples a step, evaluated twice."""
    yield events.TrainingStarted(at(first), num_parameters=1234)
    for samples in range(first + every, TOTAL + 1, every):
        yield step(samples)
        if samples % 500 == 0:
            yield evaluation(samples, {"validation/loss": 0.25, "validation/accuracy": samples / TOTAL})
    yield events.TrainingEnded(at(TOTAL), "all samples used")


def lines_of(
    stream: Iterator[Event] | list[Event], seconds_per_event: float = 0.0, labels: tuple[str, ...] = ()
) -> list[str]:
    """What the plain form prints, with a clock that ticks at every event."""
    console = Console(file=io.StringIO(), width=120, highlight=False, markup=False)
    ticks = (seconds_per_event * i for i in count())
    with use_progress(console, labels or ("seed 0",), clock=lambda: next(ticks)) as listener:
        for event in stream:
            listener(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_numbers_of_a_training() -> None:
    snapshot = start("seed 0", events.TrainingStarted(at(0), 1), now=100.0)
    snapshot = advance(snapshot, step(10, loss=0.5, seconds=0.2), now=101.0)
    snapshot = advance(snapshot, step(20, loss=0.25, seconds=0.2), now=104.0)
    assert (snapshot.fraction, snapshot.loss, snapshot.elapsed) == (0.02, 0.25, 4.0)
    assert snapshot.throughput == 50.0  # 20 samples in 0.4 s of steps
    assert snapshot.seconds_left == 196.0  # 980 samples at 5 a second, all else included
    assert bar_numbers(snapshot) == "loss 0.2500  50 samples/s  left 3:16"


def test_resumed_training_does_not_count_what_was_there_before() -> None:
    snapshot = start("seed 0", events.TrainingStarted(at(500), 1), now=0.0)
    snapshot = advance(snapshot, step(510), now=1.0)
    assert snapshot.seconds_left == 49.0


def test_nothing_is_known_before_the_first_step() -> None:
    snapshot = start("seed 0", events.TrainingStarted(at(0), 1), now=0.0)
    assert math.isinf(snapshot.seconds_left)
    assert bar_numbers(snapshot) == "loss nan  0 samples/s  left -"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"validation/loss": 0.5, "validation/accuracy": 0.9}, "accuracy 0.9000"),
        ({"validation/loss": 0.5}, "loss 0.5000"),
        ({}, ""),
    ],
)
def test_evaluation_shows_what_is_not_the_loss_first(values: dict[str, float], text: str) -> None:
    snapshot = advance(ProgressView("seed 0", 0, 0, 0, 0, TOTAL), evaluation(10, values), now=1.0)
    assert snapshot.evaluated == text


def test_plain_form_is_one_line_per_twentieth_and_evaluation() -> None:
    lines = lines_of(training())
    assert lines[0] == "seed 0  started, 1,234 parameters"
    assert lines[1] == "seed 0    5%  loss 0.5000  100 samples/s  left 0:00"
    assert "seed 0  epoch 1  validation/loss 0.2500  validation/accuracy 0.5000" in lines
    assert lines[-1] == "seed 0  all samples used after 0:00"
    assert len(lines) == LINES_PER_TRAINING + 4


def test_number_of_lines_is_bounded_however_slow_or_long() -> None:
    assert len(lines_of(training(every=1), seconds_per_event=100.0)) < 2 * LINES_PER_TRAINING + 10


def test_slow_training_is_heard_of_before_its_first_twentieth() -> None:
    slow = [events.TrainingStarted(at(0), 1), step(10), step(20)]
    assert lines_of(slow, seconds_per_event=9.0)[1:] == ["seed 0    2%  loss 0.5000  100 samples/s  left 14:42"]


def test_each_training_has_its_own_label() -> None:
    lines = lines_of([*training(), *training(), *training()], labels=("seed 4", "seed 5"))
    assert {line.split("  ")[0] for line in lines} == {"seed 4", "seed 5", "training"}


def test_notice_is_printed_even_before_the_training_starts() -> None:
    assert lines_of([events.Notice("resumed from step 3")]) == ["note: resumed from step 3"]


def test_quiet_form_prints_notices_alone() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with use_progress(console, ["seed 0"], quiet=True) as listener:
        for event in [events.Notice("a damaged checkpoint was passed over"), *training()]:
            listener(event)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "note: a damaged checkpoint was passed over\n"


def test_every_training_starts_its_own_clock() -> None:
    slow: list[Event] = [events.TrainingStarted(at(0), 1), step(10), step(20)]
    one, two = lines_of(slow, seconds_per_event=9.0), lines_of([*slow, *slow], seconds_per_event=9.0)
    assert two[len(one) :] == [line.replace("seed 0", "training") for line in one]


def test_events_that_change_nothing_print_nothing() -> None:
    quiet: list[Event] = [
        events.EpochEnded(0),
        events.StepStarted(at(0)),
        events.EvaluationStarted(at(0), "validation"),
    ]
    short = list(training(first=TOTAL - 10))
    assert lines_of([events.EpochStarted(0), *short, *quiet]) == lines_of(short)


CONTROL = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


def bars_at(width: int, stream: Iterator[Event]) -> str:
    """All that the live form writes to a terminal of this width, with a clock of 1 s an event."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    ticks = (float(i) for i in count())
    with use_progress(console, ["seed 0"], clock=lambda: next(ticks)) as listener:
        for event in stream:
            listener(event)
    assert isinstance(console.file, io.StringIO)
    return CONTROL.sub("", console.file.getvalue())


@pytest.mark.parametrize("width", [80, 120])
def test_bar_of_a_training_that_ended(width: int) -> None:
    last = bars_at(width, training()).rstrip().splitlines()[-1]
    assert last.startswith("seed 0 ━") and "100%" in last
    assert "accuracy 1  all samples used after 1:4" in last


def test_bar_of_a_training_that_stopped_early_stays_where_it_was() -> None:
    early = [events.TrainingStarted(at(0), 1), step(430), events.TrainingEnded(at(430), "interrupted")]
    assert " 43% interrupted after 0:02" in bars_at(80, iter(early))


def test_bar_leaves_room_for_the_sign_of_ctrl_c() -> None:
    busy = [events.TrainingStarted(at(0), 1), evaluation(0, {"validation/accuracy": 0.98765}), step(430, 0.012345)]
    last = bars_at(80, iter(busy)).rstrip().splitlines()[-1]
    assert "left 0:03" in last and len(last.rstrip()) <= 78


def test_bar_is_not_drawn_at_every_step() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with use_progress(console, ["seed 0"], clock=lambda: 0.0) as listener:
        listener(events.TrainingStarted(at(0), 1))
        for samples in range(10, 500, 10):
            listener(step(samples))
    assert isinstance(console.file, io.StringIO)
    assert " 49%" not in console.file.getvalue()


def test_notice_stands_above_the_bar() -> None:
    assert "note: resumed from step 3" in bars_at(80, iter([events.Notice("resumed from step 3"), *training()]))


def test_what_goes_on_beside_the_steps_is_a_line_before_it_begins() -> None:
    stream = [events.Stage("loading data"), *training(every=500), events.Stage("measuring one step")]
    lines = lines_of(stream)
    assert (lines[0], lines[-1]) == ("loading data", "measuring one step")


def test_a_quiet_run_says_nothing_of_it() -> None:
    console = Console(file=io.StringIO())
    with use_progress(console, ("seed 0",), quiet=True) as listener:
        listener(events.Stage("loading data"))
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == ""
