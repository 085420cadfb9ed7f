"""A step's computation measured on this machine, for the virtual cluster to charge."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from weft.distributed.group.solo import SoloGroup
from weft.distributed.placement.data_parallel import DataParallel
from weft.metrics.timing import synchronise_device
from weft.planning.network import fit_alpha_beta
from weft.simulation.computation import ComputeModel
from weft.torch_private import use_determinism
from weft.training.build import build_task
from weft.training.datasets import Splits
from weft.training.gradients import gradients_of
from weft.training.loop import Task, TrainingState
from weft.training.process import use_threads
from weft.training.recipe import Recipe
from weft.training.replicas import SoloReplicas, Update

__all__ = ["measure_computation"]

NUM_WARM_UPS, NUM_STEPS = 3, 15


@dataclass(frozen=True)
class TimedStep:
    """Seconds from the first touch of a batch to the end of its pass, from there to the end of the update, and from the
    first touch to each gradient. What a rank does for the exchange by itself (packing, unpacking) is in them."""

    seconds: float
    update: float
    ready: dict[str, float]


def measure_computation(recipe: Recipe, splits: Splits, num_samples: int, *, num_threads: int = 1) -> ComputeModel:
    """Time some steps of one rank on `num_samples` (its share of a batch) and on more, and take medians. The rank goes
    through all that an exchange takes but has nobody to talk to.

    What a step costs besides its samples, and what each sample adds, is a line through the times of the batch sizes.
    """
    sizes = sorted({size for factor in (1, 2, 4) if (size := num_samples * factor) <= len(splits.train)})
    with use_threads(num_threads), use_determinism(), torch.random.fork_rng(devices=[]):
        timed = {size: _time_steps(recipe, splits, size) for size in sizes}
    own = timed[num_samples]
    per_pass, per_sample = _line_through({size: median(s.seconds for s in steps) for size, steps in timed.items()})
    return ComputeModel(
        seconds_per_pass=per_pass,
        seconds_per_sample=per_sample,
        seconds_per_update=median(step.update for step in own),
        ready={name: median(step.ready[name] / step.seconds for step in own) for name in own[0].ready},
    )


def _line_through(seconds: dict[int, float]) -> tuple[float, float]:
    if len(seconds) == 1:
        return next(iter(seconds.values())), 0.0
    return fit_alpha_beta(list(seconds), list(seconds.values()))


def _time_steps(recipe: Recipe, splits: Splits, num_samples: int) -> Sequence[TimedStep]:
    is_alone = recipe.mutable.plan.num_ranks == 1
    replicas = SoloReplicas() if is_alone else DataParallel(SoloGroup())
    task, state = build_task(recipe, splits, seed=0, replicas=replicas)
    replicas.join(state.model)
    timed = []
    for _ in range(NUM_WARM_UPS + NUM_STEPS):
        state, step = _time_step(task, state, num_samples)
        timed.append(step)
    return timed[NUM_WARM_UPS:]


def _time_step(task: Task, state: TrainingState, num_samples: int) -> tuple[TrainingState, TimedStep]:
    ready: dict[str, float] = {}
    device = state.model.device
    synchronise_device(device)
    began = time.perf_counter()
    batch = task.splits.train.take(torch.arange(num_samples))
    exchange = task.replicas.begin(1.0)

    def sink(name: str, gradient: Tensor | None) -> None:
        synchronise_device(device)
        ready[name] = time.perf_counter() - began
        exchange(name, gradient)

    loss, model = gradients_of(task.executor, state.model, batch, 1, sink)
    synchronise_device(device)
    seconds = time.perf_counter() - began
    update = Update(task.optimizer, model.parameters, state.optimizer, task.optimizer.lr, task.clip_norm)
    _, optimizer = task.replicas.finish(loss, update)
    synchronise_device(device)
    rest = time.perf_counter() - began - seconds
    return replace(state, model=model, optimizer=optimizer), TimedStep(seconds, rest, ready)
