"""A small training task whose state has every kind of part: dropout, running statistics, momentum, a schedule."""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.graph import EagerExecutor
from weft.metrics.metric import Rule
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.datasets import AbstractDataset, Splits
from weft.training.events import Event, StopTraining
from weft.training.loop import Task, TrainingState
from weft.training.optimizers import AbstractOptimizer, Momentum, Optimizer
from weft.training.sampling import Ordered, Sampler, Shuffled

__all__ = ["Recorder", "StopAt", "TinyData", "build_tiny", "clock_of_ticks", "ignore", "module_of_every_kind"]


@dataclass(frozen=True)
class TinyData(AbstractDataset):
    """y = the sum of x, plus what the epoch adds: a sample that is taken in the wrong epoch is a wrong sample."""

    size: int
    seed: int = 0

    def __len__(self) -> int:
        return self.size

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        inputs = torch.randn(self.size, 3, generator=torch.Generator().manual_seed(self.seed))[indices]
        return Batch((inputs,), (inputs.sum(1, keepdim=True) + 0.01 * epoch,))

    def checksum(self) -> str:
        return hashlib.sha256(f"{self.size} {self.seed}".encode()).hexdigest()


def module_of_every_kind() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))


def build_tiny(
    module: Callable[[], nn.Module] = module_of_every_kind,
    optimizer: Callable[[], AbstractOptimizer] = lambda: Optimizer(Momentum(), lr=0.05),
    train: AbstractDataset | None = None,
    shuffle: bool = True,
    batch_size: int = 4,
    epochs: float = 2.0,
    evaluate_every: int = 10,
    target: Rule | None = None,
    **options: Any,
) -> tuple[Task, TrainingState]:
    """A task and its state at step 0, the same whenever it is asked for."""
    train = train or TinyData(10)
    splits = Splits("tiny", TaskSpec(TensorSpec((3,)), 1), train, TinyData(6, 1), TinyData(6, 2))
    total_samples = round(epochs * len(train))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        executor = EagerExecutor(module(), nn.functional.mse_loss)
    order = Shuffled(len(train), seed=3) if shuffle else Ordered(len(train))
    task = Task(
        splits=splits,
        executor=executor,
        optimizer=optimizer(),
        schedule=lambda samples: 1 - 0.5 * samples / total_samples,
        sampler=Sampler(order, batch_size),
        total_samples=total_samples,
        evaluate_every=evaluate_every,
        metrics=("max_error",),
        target=target,
        **options,
    )
    model = replace(executor.initial_state(), random=torch.Generator().manual_seed(5).get_state())
    return task, TrainingState(model, task.optimizer.init(model.parameters))


def clock_of_ticks() -> Callable[[], float]:
    """A clock that is a second later each time it is read."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


@dataclass
class Recorder:
    """A listener that keeps every event."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)


@dataclass
class StopAt:
    """A listener that asks for the end at the n-th event of a kind."""

    kind: type
    count: int

    def __call__(self, event: Event) -> None:
        self.count -= isinstance(event, self.kind)
        if self.count == 0 and isinstance(event, self.kind):
            raise StopTraining("asked to")


def ignore(_: object) -> None:
    """A listener, or a place to save, that does nothing."""
