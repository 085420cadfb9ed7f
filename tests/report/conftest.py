"""Records with plain numbers, so that every table can be checked by eye."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from weft.records.record import Evaluation, Repetition, RunRecord, Verdict

RecordMaker = Callable[..., RunRecord]


def recipe_dict(lr: float, epochs: int) -> dict[str, Any]:
    return {
        "name": "tiny",
        "description": "a tiny recipe",
        "fixed": {
            "model": {"name": "mlp", "options": {"hidden": [64, 32]}},
            "epochs": epochs,
            "target": {"metric": "accuracy", "bound": 0.97},
        },
        "mutable": {"batch_size": 32, "optimizer": {"name": "adam", "options": {"lr": lr}}, "clip_norm": None},
        "rules": [],
    }


def evaluations(count: int) -> tuple[Evaluation, ...]:
    return tuple(
        Evaluation(10 * i, 320 * i, float(i), 0.5 * i, {"validation/loss": 2.0 / i, "validation/accuracy": 1 - 0.5 / i})
        for i in range(1, count + 1)
    )


@pytest.fixture
def make_record() -> RecordMaker:
    """`make_record(accuracies=..., times=...)`: a repetition for each value; a time of infinity is a failed one."""

    def make(
        times: Sequence[float] = (2.5,),
        accuracies: Sequence[float] | None = None,
        *,
        lr: float = 0.01,
        epochs: int = 4,
        verdicts: tuple[Verdict, ...] = (),
        machine: dict[str, Any] | None = None,
        checksum: str = "0123456789abcdef",
    ) -> RunRecord:
        accuracies = accuracies or [0.98] * len(times)
        repetitions = tuple(
            Repetition(
                seed,
                "done" if math.isfinite(time) else "failed",
                "target reached (accuracy >= 0.97)" if math.isfinite(time) else "loss is not finite (step: 3)",
                checksum,
                evaluations(epochs) if math.isfinite(time) else (),
                {"test/accuracy": accuracy, "time_to_target": time} if math.isfinite(time) else {},
                {"train/loss": (2.0, 1.0, 0.5)},
            )
            for seed, (time, accuracy) in enumerate(zip(times, accuracies, strict=True))
        )
        return RunRecord(
            name="tiny",
            recipe=recipe_dict(lr, epochs),
            fixed_hash=f"{epochs:064d}",
            created="2026-01-02T03:04:05+00:00",
            clock_rules="never paused",
            source={"commit": "fedcba9876543210", "dirty": True},
            versions={"python": "3.11.7", "torch": "2.13.0"},
            machine=machine or {"cpu": "Acme 9", "cores": 2, "memory_bytes": 8_000_000_000, "torch_threads": 2},
            repetitions=repetitions,
            verdicts=verdicts,
        )

    return make


@pytest.fixture
def measured_record() -> RunRecord:
    """What `Measurements.save` writes: one repetition, no recipe, raw series with a slow start."""
    steps = (0.09, 0.05, *(0.010 + 0.0001 * (i % 3) for i in range(12)))
    repetition = Repetition(7, "done", "measured", "", (), {"train/step_time": 0.0101}, {"train/step_time": steps})
    return RunRecord("mine", {}, "", "2026-01-02T03:04:05+00:00", "every step", {}, {}, {}, (repetition,))
