"""The training loop. Everything that can vary is behind a seam; everything that happens is an event."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weft.errors import DivergedError, PeerLostError, TrainingError
from weft.graph import AbstractExecutor, State
from weft.metrics.metric import Rule
from weft.metrics.timing import synchronise_device
from weft.records.record import Evaluation
from weft.specs import Batch
from weft.training import events
from weft.training.datasets import Splits
from weft.training.evaluation import evaluate
from weft.training.events import Listener, Progress, StepResult, StopTraining
from weft.training.gradients import gradients_of, use_point
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.replicas import AbstractReplicas, SoloReplicas, Update
from weft.training.sampling import Sampler, SamplerState
from weft.training.schedules import Schedule
from weft.training.whole_step import StepInOne

__all__ = ["Task", "TrainingState", "take_step", "train"]


@dataclass(frozen=True)
class Task:
    """The constant parts of a training: those of a recipe, built."""

    splits: Splits
    executor: AbstractExecutor
    optimizer: AbstractOptimizer
    schedule: Schedule
    sampler: Sampler
    total_samples: int
    evaluate_every: int  # in samples
    metrics: tuple[str, ...] = ()
    target: Rule | None = None  # on the validation split
    accumulate: int = 1
    clip_norm: float | None = None
    replicas: AbstractReplicas = field(default_factory=SoloReplicas)
    step_in_one: StepInOne | None = None  # of one rank: what executor and optimizer do, to the same bits


@dataclass(frozen=True)
class TrainingState:
    """The changing part of a training: a checkpoint holds this and nothing else is needed to go on to the same bits."""

    model: State
    optimizer: OptimizerState
    sampler: SamplerState = SamplerState(0, 0)  # noqa: RUF009 -- frozen
    step: int = 0
    samples: int = 0
    evaluated: int = 0  # samples seen at the last evaluation
    target_met: bool = False  # at the last evaluation


def train(
    task: Task,
    state: TrainingState,
    *,
    emit: Listener,
    save: Callable[[TrainingState], None],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[TrainingState, str]:
    """Train until the samples are used up, the target is met or a listener raises StopTraining.

    Evaluation comes at the top of the loop, so that a run resumed from a checkpoint, which is written after a step,
    makes up for an evaluation that was due.

    Args:
        emit: receives every event.
        save: receives the state after every step, and decides for itself when to write it.
        clock: seconds since the first touch of the data.

    Returns:
        The final state, and in words why training ended.
    """
    num_parameters = sum(_size(task, name, parameter) for name, parameter in state.model.parameters.items())
    reason = "all samples used"
    wishes: list[str] = []
    if task.replicas.mesh.num_ranks > 1:
        emit = _noting(wishes, emit)
    try:
        emit(events.TrainingStarted(progress_of(task, state), num_parameters))
        while True:
            state = _catch_up(task, state)
            if is_evaluation_due(task, state):
                emit(events.EvaluationStarted(progress_of(task, state), "validation"))
                evaluation = _evaluate(task, state, clock)
                is_met = evaluation is not None and is_target_met(task.target, evaluation.values)
                state = replace(state, evaluated=state.samples, target_met=is_met)
                if evaluation is not None:
                    emit(events.EvaluationEnded(progress_of(task, state), "validation", evaluation))
            if state.target_met:
                reason = f"target reached ({task.target})"
                task.replicas.dismiss()
                break
            if state.samples >= task.total_samples:
                break
            if state.sampler.offset == 0:
                emit(events.EpochStarted(state.sampler.epoch))
            emit(events.StepStarted(progress_of(task, state)))
            epoch, started = state.sampler.epoch, clock()
            state, result = take_step(task, state)
            synchronise_device(state.model.device)
            emit(events.StepEnded(progress_of(task, state), result, clock() - started))
            if task.replicas.agree_to_stop(bool(wishes)):
                raise StopTraining(wishes[0] if wishes else "another rank wished to stop")
            if state.sampler.epoch != epoch:
                emit(events.EpochEnded(epoch))
            save(state)
    except StopTraining as stop:
        reason = str(stop)
    emit(events.TrainingEnded(progress_of(task, state), reason))
    return state, reason


def take_step(task: Task, state: TrainingState) -> tuple[TrainingState, StepResult]:
    """One global batch: this rank's gradients, the exchange with the others, the update. The state is consumed."""
    indices, sampler = task.sampler.next_batch(state.sampler)
    batch = task.splits.train.take(task.replicas.share(indices), state.sampler.epoch)
    lr = task.optimizer.lr * task.schedule(state.samples)
    weight = _weight(task, batch, indices)
    placement, sent = task.replicas.placement, task.replicas.placement.activation_bytes

    if task.step_in_one is not None and task.step_in_one.stands_for(task.executor, task.optimizer):
        loss, model, optimizer = task.step_in_one(state.model, state.optimizer, batch, lr)
        total = loss
    else:
        parameters, loss, model = state.model.parameters, 0.0, state.model
        on_gradient = task.replicas.begin(weight)
        point = placement.prepare(task.optimizer, parameters, state.optimizer)
        with use_point(parameters, point):
            if len(batch) or placement.takes_forwards_together:
                loss, model = gradients_of(
                    task.executor,
                    state.model,
                    batch,
                    task.accumulate,
                    on_gradient,
                    placement.weighting,
                    keeps_empty=placement.takes_forwards_together,
                )
        owned = placement.owned(parameters)
        update = Update(
            task.optimizer, owned, state.optimizer, lr, task.clip_norm, placement.norm, placement.whole_norms
        )
        total, optimizer = task.replicas.finish(weight * loss if placement.has_loss else 0.0, update)
    if not math.isfinite(total):
        raise _divergence(task, state, batch, loss)

    samples = state.samples + len(indices)
    after = replace(state, model=model, optimizer=optimizer, sampler=sampler, step=state.step + 1, samples=samples)
    traffic = replace(task.replicas.traffic(), activation_bytes=placement.activation_bytes - sent)
    return after, StepResult(total, lr, len(indices), traffic)


def _size(task: Task, name: str, parameter: Tensor) -> int:
    """Elements of the whole parameter, of which this rank may hold a part."""
    cut = task.replicas.placement.cut_of(f"parameter/{name}")
    return parameter.numel() if cut is None else math.prod(cut.shape)


def _catch_up(task: Task, state: TrainingState) -> TrainingState:
    """Go on at another global batch where the replicas say so."""
    step = task.replicas.next_step(state.step)
    if step == state.step:
        return state
    sampler = task.sampler.state_at(step)
    return replace(state, step=step, sampler=sampler, samples=task.sampler.samples_before(sampler))


def _noting(wishes: list[str], emit: Listener) -> Listener:
    """Notes a listener's wish to stop, at whatever event: ranks that train together must stop after the same step."""

    def note(event: events.Event) -> None:
        try:
            emit(event)
        except StopTraining as stop:
            wishes.append(str(stop))

    return note


def is_evaluation_due(task: Task, state: TrainingState) -> bool:
    """Whether a multiple of the period has been passed since the last evaluation, or training is at its end."""
    period = task.evaluate_every
    at_end = state.samples >= task.total_samples and state.samples != state.evaluated
    return at_end or state.samples // period > state.evaluated // period


def is_target_met(target: Rule | None, values: Mapping[str, float]) -> bool:
    return target is not None and target.accepts(values[f"validation/{target.metric}"])


def progress_of(task: Task, state: TrainingState) -> Progress:
    return Progress(state.step, state.samples, task.total_samples, state.samples / len(task.splits.train))


def _evaluate(task: Task, state: TrainingState, clock: Callable[[], float]) -> Evaluation | None:
    """None on a rank that has no part in evaluations."""
    with task.replicas.use_consensus(state.model) as consensus:
        if consensus.judges is None:
            return None
        found = evaluate(task.executor, state.model, task.splits.validation, task.metrics, consensus.judges)
    if not math.isfinite(found["loss"]):  # an update that overflowed shows here first, or nowhere after the last step
        batch = task.splits.validation.take(torch.arange(min(len(task.splits.validation), 32)))
        raise _divergence(task, state, batch, found["loss"])
    values = {f"validation/{name}": value for name, value in found.items()} | dict(consensus.values)
    return Evaluation(state.step, state.samples, progress_of(task, state).epoch, clock(), values)


def _weight(task: Task, batch: Batch, indices: Tensor) -> float:
    """How much this rank's mean counts in the mean of all: by samples, or by targets where samples differ in them.

    The weights of all ranks sum to 1. Ranks that do not meet count the targets of the whole batch each for itself.
    """
    data, replicas = task.splits.train, task.replicas
    if replicas.mesh.num_replicas == 1:
        return 1.0
    total = 0.0
    if data.has_padding() and replicas.is_synchronous:
        own = batch.num_targets if replicas.placement.has_loss else 0
        total = replicas.sum(torch.tensor([own], dtype=torch.float64)).item()
    elif data.has_padding():
        total = data.num_targets(indices)
    return batch.num_targets / total if total else len(batch) / len(indices)


def _divergence(task: Task, state: TrainingState, batch: Batch, loss: float) -> TrainingError:
    if math.isfinite(loss):
        return PeerLostError("loss of another rank is not finite; that rank says why", peer=-1)
    bad = "not looked for, as the other ranks have stopped"
    if not task.replicas.placement.takes_forwards_together:  # else a forward needs them all
        bad = task.executor.first_bad_tensor(state.model, batch) or "the loss itself"
    where = f"step: {state.step}, loss: {loss}, first bad tensor: {bad}"
    return DivergedError(f"loss is not finite ({where}); lower the learning rate, warm up, or clip gradients")
