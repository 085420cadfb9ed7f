"""A step's computation measured on this machine, for the virtual cluster to charge."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from weft.engines.computation import ComputeModel
from weft.engines.proving import use_threads
from weft.planning.network import fit_alpha_beta
from weft.torch_private import use_determinism
from weft.training.build import build_task
from weft.training.datasets import Splits
from weft.training.loop import Task, TrainingState
from weft.training.recipe import Recipe

__all__ = ["measure_computation"]

NUM_WARM_UPS, NUM_STEPS = 3, 15


@dataclass(frozen=True)
class TimedStep:
    """Seconds from the first touch of a batch to the end of its pass, of the update, and to each gradient."""

    seconds: float
    update: float
    ready: dict[str, float]


def measure_computation(recipe: Recipe, splits: Splits, num_samples: int, *, num_threads: int = 1) -> ComputeModel:
    """Time some steps of one rank on `num_samples` (its share of a batch) and on more, and take medians.

    What a step costs besides its samples, and what each sample adds, is a line through the times of the batch sizes.
    """
    sizes = sorted({size for factor in (1, 2, 4) if (size := num_samples * factor) <= len(splits.train)})
    with use_threads(num_threads), use_determinism(), torch.random.fork_rng(devices=[]):
        timed = {size: _time_steps(*build_task(recipe, splits, seed=0), size) for size in sizes}
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


def _time_steps(task: Task, state: TrainingState, num_samples: int) -> Sequence[TimedStep]:
    timed = []
    for _ in range(NUM_WARM_UPS + NUM_STEPS):
        state, step = _time_step(task, state, num_samples)
        timed.append(step)
    return timed[NUM_WARM_UPS:]


def _time_step(task: Task, state: TrainingState, num_samples: int) -> tuple[TrainingState, TimedStep]:
    gradients: dict[str, Tensor | None] = {}
    ready: dict[str, float] = {}
    began = time.perf_counter()

    def sink(name: str, gradient: Tensor | None) -> None:
        ready[name] = time.perf_counter() - began
        gradients[name] = gradient

    batch = task.splits.train.take(torch.arange(num_samples))
    _, model = task.executor(state.model, batch, sink)
    seconds = time.perf_counter() - began
    optimizer = task.optimizer.update(gradients, model.parameters, state.optimizer, task.optimizer.lr)
    update = time.perf_counter() - began - seconds
    return replace(state, model=model, optimizer=optimizer), TimedStep(seconds, update, ready)
