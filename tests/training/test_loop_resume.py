"""A run that was stopped or killed anywhere goes on to the bits and the record of one that was not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.planted import (
    StopAt,
    build_tiny,
    hash_of,
    loss_of_the_second_evaluation,
    module_with_dropout,
    resume_tiny,
    run_tiny,
    through_disk,
    uninterrupted,
)
from weft.training import events
from weft.training.history import History
from weft.training.loop import TrainingState, train
from weft.training.optimizers import (
    AbstractOptimizer,
    Adam,
    Momentum,
    Optimizer,
    TorchOptimizer,
)
from weft.training.snapshot import take_snapshot

OPTIMIZERS: dict[str, Callable[[], AbstractOptimizer]] = {
    "momentum": lambda: Optimizer(Momentum(), lr=0.05),
    "adam": lambda: Optimizer(Adam(), lr=0.01),
    "torch": lambda: TorchOptimizer(torch.optim.NAdam, lr=0.01),
}

NUM_STEPS = 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", range(1, NUM_STEPS + 1))
def test_stopped_after_any_step_it_goes_on_to_the_same_bits(tmp_path: Path, optimizer: str, num_steps: int) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "evaluate_every": 7, "clip_norm": 1.0}
    expected, whole = uninterrupted(**options)
    history = History()
    stopped = run_tiny(*build_tiny(**options), StopAt(events.StepEnded, num_steps), history=history)
    assert stopped.step == num_steps
    final, resumed = resume_tiny(through_disk(tmp_path, stopped, history), **options)
    assert hash_of(final) == hash_of(expected)
    assert resumed.losses == whole.losses and resumed.evaluations == whole.evaluations


@pytest.mark.parametrize("num_steps", range(1, NUM_STEPS + 1))
def test_killed_after_any_step_it_goes_on_to_the_same_bits(tmp_path: Path, num_steps: int) -> None:
    options: dict[str, Any] = {"module": module_with_dropout, "evaluate_every": 7, "accumulate": 3}
    expected, whole = uninterrupted(**options)
    task, state = build_tiny(**options)
    history, written = History(), []

    def save(state: TrainingState) -> None:
        if state.step == num_steps:
            written.append(through_disk(tmp_path, state, history))

    train(task, state, emit=history, save=save, clock=lambda: 0.0)  # what came after the checkpoint is lost
    final, resumed = resume_tiny(written[0], **options)
    assert hash_of(final) == hash_of(expected)
    assert resumed.losses == whole.losses and resumed.evaluations == whole.evaluations


KINDS = (
    events.TrainingStarted,
    events.EpochStarted,
    events.EpochEnded,
    events.StepStarted,
    events.EvaluationStarted,
    events.EvaluationEnded,
)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_stopped_at_any_event_it_goes_on_to_the_same_bits(tmp_path: Path, kind: type, count: int) -> None:
    expected, whole = uninterrupted(evaluate_every=7)
    history = History()
    stopped = run_tiny(*build_tiny(evaluate_every=7), StopAt(kind, count), history=history)
    final, resumed = resume_tiny(through_disk(tmp_path, stopped, history), evaluate_every=7)
    assert hash_of(final) == hash_of(expected)
    assert resumed.losses == whole.losses and resumed.evaluations == whole.evaluations


@pytest.mark.parametrize("part", ["parameter/", "buffer/", "slot/", "random", "sampler", "samples"])
def test_a_resume_that_forgets_a_part_is_caught(tmp_path: Path, part: str) -> None:
    stopped = run_tiny(*build_tiny(), StopAt(events.StepEnded, 2))
    snapshot, fresh = through_disk(tmp_path, stopped, History()), take_snapshot(build_tiny()[1], {})
    entries = {n: (fresh if n.startswith(part) else snapshot).entries[n] for n in snapshot.entries}
    progress = {
        key: (fresh if key == part else snapshot).progress.get(key, value) for key, value in snapshot.progress.items()
    }
    forgetful = resume_tiny(replace(snapshot, entries=entries, progress=progress))[0]
    assert hash_of(forgetful) != hash_of(resume_tiny(snapshot)[0])


def test_a_run_that_met_its_target_does_not_go_on_when_resumed(tmp_path: Path) -> None:
    # The state at the end says that it was evaluated; without the outcome, a resumed run would train on.
    options: dict[str, Any] = {"evaluate_every": 4, "target": loss_of_the_second_evaluation()}
    final, history = uninterrupted(**options)
    again, resumed = resume_tiny(through_disk(tmp_path, final, history), **options)
    assert hash_of(again) == hash_of(final) and again.step == final.step
    assert resumed == history


def test_a_finished_run_does_not_go_on_when_resumed(tmp_path: Path) -> None:
    final, history = uninterrupted()
    again, resumed = resume_tiny(through_disk(tmp_path, final, history))
    assert hash_of(again) == hash_of(final) and resumed == history
