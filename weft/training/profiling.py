"""A recipe's training step under the profiling tape."""

from collections.abc import Callable
from dataclasses import replace

import torch

from weft.graph import GraphExecutor, Profile, TapeProgram, profile_of
from weft.operators.roofline import Roofline, measure_roofline
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.component import Component
from weft.training.loop import take_step
from weft.training.process import use_threads
from weft.training.recipe import Recipe

__all__ = ["profile_recipe"]

NUM_WARM_UPS = 3


def profile_recipe(
    recipe: Recipe,
    *,
    seed: int = 0,
    num_steps: int = 20,
    num_threads: int = 1,
    roofline_of: Callable[[int], Roofline] = measure_roofline,
) -> Profile:
    """Train some steps, and tell where the time of forward and backward goes. The update is not part of the graph.

    The profile is of the CPU, where the tape computes, and of whole batches; the shorter one at the end of an epoch is
    trained on and left out.
    """
    recipe = replace(recipe, mutable=replace(recipe.mutable, executor=Component("tape"), device="cpu"))
    check_recipe(recipe)
    with use_determinism(), use_threads(num_threads), torch.random.fork_rng(devices=[]):
        task, state = build_task(recipe, build_splits(recipe), seed)
        batch = task.splits.train.take(torch.arange(min(task.sampler.batch_size, len(task.splits.train))))
        piece = batch.split(task.accumulate)[0] if task.accumulate > 1 else batch
        for _ in range(NUM_WARM_UPS + num_steps):
            state, _ = take_step(task, state)
        assert isinstance(task.executor, GraphExecutor)
        program = task.executor.program(state.model, piece)
        assert isinstance(program, TapeProgram)
        return profile_of(program.records, roofline_of(num_threads), num_warmup=NUM_WARM_UPS)
