"""A small training task whose state has every kind of part, and what the tests of the loop do with it."""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.graph import EagerExecutor
from weft.metrics.metric import Rule
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from weft.training.datasets import AbstractDataset, Splits
from weft.training.events import Event, Listener, StopTraining
from weft.training.history import History
from weft.training.loop import Task, TrainingState, train
from weft.training.optimizers import AbstractOptimizer, Momentum, Optimizer
from weft.training.results import hash_tensors
from weft.training.sampling import Ordered, Sampler, Shuffled
from weft.training.snapshot import restore, take_snapshot

__all__ = [
    "Recorder",
    "StopAt",
    "TinyData",
    "build_tiny",
    "clock_of_ticks",
    "hash_of",
    "ignore",
    "loss_of_the_second_evaluation",
    "module_of_every_kind",
    "module_with_dropout",
    "resume_tiny",
    "run_tiny",
    "through_disk",
    "uninterrupted",
]


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


def module_with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.2), nn.Linear(6, 1))


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


def hash_of(state: TrainingState) -> str:
    """Everything that must be the same to the bit."""
    return hash_tensors({name: entry.tensor for name, entry in take_snapshot(state, {}).entries.items()})


def run_tiny(task: Task, state: TrainingState, *listeners: Listener, history: History | None = None) -> TrainingState:
    heard: list[Listener] = [history or History(), *listeners]

    def emit(event: Event) -> None:
        for listener in heard:
            listener(event)

    return train(task, state, emit=emit, save=ignore, clock=lambda: 0.0)[0]


def through_disk(folder: Path, state: TrainingState, history: History) -> Snapshot:
    return read_checkpoint(write_checkpoint(folder, take_snapshot(state, {"history": history.to_dict()})))


def resume_tiny(snapshot: Snapshot, **options: Any) -> tuple[TrainingState, History]:
    """Go on from a checkpoint in a task that was built afresh, as another process would."""
    task, state = build_tiny(**options)
    history = History()
    history.restore(snapshot.progress["history"])
    return run_tiny(task, restore(state, snapshot), history=history), history


def uninterrupted(**options: Any) -> tuple[TrainingState, History]:
    history = History()
    return run_tiny(*build_tiny(**options), history=history), history


def loss_of_the_second_evaluation() -> Rule:
    losses = [evaluation.values["validation/loss"] for evaluation in uninterrupted(evaluate_every=4)[1].evaluations]
    assert losses[1] < losses[0]
    return Rule("loss", losses[1])
