"""Weft's ranks, of which one sleeps."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import Tensor

from weft.distributed.place import LaunchedPlace
from weft.distributed.realise import RunSpec, realise
from weft.graph import AbstractExecutor, GradientSink, Outputs, State
from weft.records.run_folder import RunFolder
from weft.specs import Batch
from weft.training.events import EvaluationEnded, Event, TrainingStarted
from weft.training.loop import is_target_met
from weft.training.recipe import Recipe
from weft.training.run import run_recipe
from weft.training.surroundings import Surroundings

__all__ = ["SLEEP", "SLOW_RANK", "train_slow_rank"]

SLOW_RANK, SLEEP = 3, 2.0
"""The rank that sleeps, and for how many times the time of its own computation."""


def train_slow_rank(recipe: dict[str, Any], folder: str, seed: int) -> float | None:
    """The rank program. Rank 0 tells the seconds from the first step to the target: how long processes take to start is
    no matter here."""
    chosen, place = Recipe.from_dict(recipe), LaunchedPlace()
    moments: list[float] = []

    def watch(event: Event) -> None:
        is_met = isinstance(event, EvaluationEnded) and is_target_met(chosen.fixed.target, event.evaluation.values)
        if isinstance(event, TrainingStarted) or is_met:
            moments.append(time.perf_counter())

    surroundings = Surroundings()
    if place.rank == SLOW_RANK:
        surroundings = replace(surroundings, prepare=lambda task: replace(task, executor=Sleepy(task.executor)))
    with realise(chosen.mutable.plan, place, RunSpec.of(chosen, (seed,))) as replicas:
        if replicas is not None:
            run_recipe(
                chosen,
                folder=RunFolder(Path(folder)),
                seeds=(seed,),
                listeners=[watch],
                replicas=replicas,
                surroundings=surroundings,
            )
    return moments[1] - moments[0] if len(moments) > 1 else None


@final
class Sleepy(AbstractExecutor):
    """Sleeps as long as it took to compute, and once more, before anybody sees a gradient."""

    def __init__(self, inner: AbstractExecutor) -> None:
        self._inner = inner

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        gradients: dict[str, Tensor | None] = {}
        began = time.perf_counter()
        outputs, after = self._inner(state, batch, gradients.__setitem__)
        time.sleep(SLEEP * (time.perf_counter() - began))
        for name, gradient in gradients.items():
            on_gradient(name, gradient)
        return outputs, after

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._inner.first_bad_tensor(state, batch)
