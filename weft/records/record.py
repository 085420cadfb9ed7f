"""The record of a run: every raw value, and everything needed to judge or repeat it."""

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["SCHEMA", "Evaluation", "Repetition", "RunRecord", "Verdict"]

SCHEMA = 1

Status = Literal["running", "done", "failed", "interrupted"]


@dataclass(frozen=True)
class Evaluation:
    """One evaluation: where training stood, and the values by `split/metric`."""

    step: int
    samples: int
    epoch: float
    seconds: float  # since the first touch of the data
    values: dict[str, float]


@dataclass(frozen=True)
class Repetition:
    """One training from one seed."""

    seed: int
    status: Status
    stop_reason: str  # in words: "target reached", "all epochs done", or the error
    data_checksum: str
    evaluations: tuple[Evaluation, ...] = ()
    values: dict[str, float] = field(default_factory=dict)  # one number per metric; a failure is infinity
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)  # raw values, such as every step's seconds
    hashes: dict[str, str] = field(default_factory=dict)  # of the final parameters: same seed, same bits


@dataclass(frozen=True)
class Verdict:
    """An acceptance rule applied to the run."""

    rule: str
    value: float
    passed: bool


@dataclass(frozen=True)
class RunRecord:
    """The content of `record.json`."""

    name: str
    recipe: dict[str, Any]  # as Recipe.to_dict() gives it; empty for a user's own measured loop
    fixed_hash: str
    created: str  # ISO 8601, UTC
    clock_rules: str
    source: dict[str, Any]  # git commit and dirty flag, or empty
    versions: dict[str, str]
    machine: dict[str, Any]
    repetitions: tuple[Repetition, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    schema: int = SCHEMA

    @property
    def accepted(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def values_of(self, metric: str) -> list[float]:
        """The metric's value in every repetition that has one."""
        return [r.values[metric] for r in self.repetitions if metric in r.values]
