"""A training of some global batches as one of the ranks that go at their own pace."""

from collections.abc import Callable
from dataclasses import replace

import torch

from weft.proving.method import Case
from weft.proving.proof import Trace, copy_of
from weft.proving.reference import spoil
from weft.training.build import build_task
from weft.training.events import Event
from weft.training.loop import TrainingState, train
from weft.training.replicas import AbstractReplicas

__all__ = ["train_to_the_end"]


def train_to_the_end(
    case: Case, replicas: AbstractReplicas, emit: Callable[[Event], None] = lambda _event: None
) -> tuple[TrainingState, Trace]:
    """Train until all ranks have ended; the state, and this rank's weights and slots after each of its steps."""
    task, state = build_task(case.recipe, case.splits, case.seed, replicas, case.device, case.dtype)
    task = replace(task, total_samples=case.num_steps * task.sampler.batch_size, target=None)
    spoil(state, replicas)
    replicas.join(state.model)
    trace: Trace = []
    state, _ = train(task, state, emit=emit, save=lambda s: trace.append(copy_of(s.model.parameters, s.optimizer)))
    replicas.sum(torch.zeros(1))
    return state, trace
