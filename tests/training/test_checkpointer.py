"""When a checkpoint is written."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.planted import build_tiny
from weft.training.checkpoint import read_checkpoint
from weft.training.checkpointer import Checkpointer
from weft.training.component import Component
from weft.training.recipe import Mutable


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def settings(steps: int | None = None, seconds: float | None = None) -> Mutable:
    return Mutable(1, Component("sgd", lr=1), checkpoint_steps=steps, checkpoint_seconds=seconds)


def steps_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutable: Mutable, seconds_per_step: float
) -> tuple[list[int], Checkpointer, Callable[[int], None]]:
    """Which of ten steps were written, and the checkpointer after them."""
    written: list[int] = []
    monkeypatch.setattr(
        "weft.training.checkpointer.write_checkpoint", lambda _, snapshot, ranks: written.append(snapshot.step)
    )
    clock, state = Clock(), build_tiny()[1]
    checkpointer = Checkpointer(folder, mutable, dict, clock=clock)
    for step in range(1, 11):
        clock.now += seconds_per_step
        checkpointer(replace(state, step=step))
    return written, checkpointer, lambda step: checkpointer.write(replace(state, step=step))


@pytest.mark.parametrize(
    ("mutable", "seconds_per_step", "expected"),
    [
        (settings(), 100.0, []),
        (settings(steps=4), 0.0, [4, 8]),
        (settings(steps=1), 0.0, list(range(1, 11))),
        (settings(seconds=3.0), 1.0, [3, 6, 9]),
        (settings(seconds=3.0), 2.0, [2, 4, 6, 8, 10]),
        (settings(seconds=3.0), 0.0, []),
        (settings(steps=5, seconds=3.0), 1.0, [3, 5, 8, 10]),
    ],
    ids=range(7),
)
def test_due_by_steps_by_seconds_or_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutable: Mutable, seconds_per_step: float, expected: list[int]
) -> None:
    assert steps_written(tmp_path, monkeypatch, mutable, seconds_per_step)[0] == expected


def test_the_last_step_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, _, write = steps_written(tmp_path, monkeypatch, settings(steps=5), 0.0)
    write(10)
    assert written == [5, 10]
    write(11)
    write(11)
    assert written == [5, 10, 11]


def test_progress_is_asked_for_when_it_is_written(tmp_path: Path) -> None:
    losses: list[float] = []
    progress: Callable[[], dict[str, Any]] = lambda: {"losses": list(losses)}  # noqa: E731
    checkpointer = Checkpointer(tmp_path, settings(steps=2), progress)
    state = build_tiny()[1]
    for step in (1, 2, 3):
        losses.append(step / 2)
        checkpointer(replace(state, step=step))
    (folder,) = tmp_path.iterdir()
    found = read_checkpoint(folder)
    assert found.step == 2 and found.progress["losses"] == [0.5, 1.0]
