"""The history of a training: every evaluation and every step's loss and seconds."""

from dataclasses import asdict, dataclass, field
from typing import Any

from weft.records.record import Evaluation
from weft.training.events import EvaluationEnded, Event, StepEnded
from weft.training.replicas import Traffic

__all__ = ["History"]


@dataclass
class History:
    """A listener that collects, and that a checkpoint carries, so that a resumed run has the whole of its record."""

    evaluations: list[Evaluation] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_samples: list[int] = field(default_factory=list)
    step_traffic: list[Traffic] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        match event:
            case StepEnded(_, result, seconds):
                self.losses.append(result.loss)
                self.step_seconds.append(seconds)
                self.step_samples.append(result.num_samples)
                self.step_traffic.append(result.traffic)
            case EvaluationEnded(_, _, evaluation):
                self.evaluations.append(evaluation)
            case _:
                pass

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, data: dict[str, Any]) -> None:
        """Begin with what a checkpoint carried."""
        self.evaluations = [Evaluation(**evaluation) for evaluation in data["evaluations"]]
        self.losses = list(data["losses"])
        self.step_seconds = list(data["step_seconds"])
        self.step_samples = list(data["step_samples"])
        self.step_traffic = [Traffic(**traffic) for traffic in data["step_traffic"]]
