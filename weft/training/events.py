"""Events of a training, as data. A listener is any function that takes an event."""

from collections.abc import Callable
from dataclasses import dataclass, field

from weft.records.record import Evaluation
from weft.training.replicas import Traffic

__all__ = [
    "EpochEnded",
    "EpochStarted",
    "EvaluationEnded",
    "EvaluationStarted",
    "Event",
    "Listener",
    "Notice",
    "Progress",
    "Stage",
    "StepEnded",
    "StepResult",
    "StepStarted",
    "StopTraining",
    "TrainingEnded",
    "TrainingStarted",
]


@dataclass(frozen=True)
class Progress:
    """Where training stands. Samples are global: those of all ranks together."""

    step: int
    samples: int
    total_samples: int
    epoch: float  # samples / size of the training set


@dataclass(frozen=True)
class StepResult:
    """Loss, learning rate, samples and traffic of a step."""

    loss: float
    lr: float
    num_samples: int
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class TrainingStarted:
    progress: Progress
    num_parameters: int


@dataclass(frozen=True)
class TrainingEnded:
    progress: Progress
    reason: str


@dataclass(frozen=True)
class EpochStarted:
    epoch: int


@dataclass(frozen=True)
class EpochEnded:
    epoch: int


@dataclass(frozen=True)
class StepStarted:
    progress: Progress


@dataclass(frozen=True)
class StepEnded:
    progress: Progress
    result: StepResult
    seconds: float


@dataclass(frozen=True)
class EvaluationStarted:
    progress: Progress
    split: str


@dataclass(frozen=True)
class EvaluationEnded:
    progress: Progress
    split: str
    evaluation: Evaluation


@dataclass(frozen=True)
class Notice:
    """Something the user should know that is not an error: a damaged checkpoint passed over."""

    text: str


@dataclass(frozen=True)
class Stage:
    """Work beside the steps that takes time and begins now."""

    text: str


Event = (
    TrainingStarted
    | TrainingEnded
    | EpochStarted
    | EpochEnded
    | StepStarted
    | StepEnded
    | EvaluationStarted
    | EvaluationEnded
    | Notice
    | Stage
)

Listener = Callable[[Event], None]


class StopTraining(Exception):  # noqa: N818 -- a request, not an error
    """Raised by a listener, best at StepEnded, to end training in good order; its text says why."""
