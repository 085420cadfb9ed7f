"""The convergence gate on real ranks: a relaxed plan and one rank, trained to the target from the same seeds."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.distributed.place import LaunchedPlace
from weft.distributed.realise import RunSpec, realise
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.rank_program import RankProgram
from weft.errors import DivergedError, RankFailedError, TrainingError, UsageError
from weft.metrics.convergence import MIN_SEEDS, Convergence, check_reference, judge_convergence
from weft.specs import Plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.datasets import Splits
from weft.training.history import History
from weft.training.loop import TrainingState, train
from weft.training.process import use_threads
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.results import to_target

__all__ = ["check_convergence", "check_target", "count_samples", "samples_of_rank"]


def check_target(recipe: Recipe, num_seeds: int) -> None:
    """Refuse what cannot be judged, before anything is trained."""
    if num_seeds < MIN_SEEDS:
        raise UsageError(f"too few seeds to judge convergence (seeds: {num_seeds}); give at least {MIN_SEEDS}, or 0")
    if recipe.fixed.target is None:
        raise UsageError("recipe has no target to converge to (target: none); --set target=accuracy:0.95, or --seeds 0")


def check_convergence(recipe: Recipe, *, seeds: Sequence[int], margin: float = 0.5) -> Convergence:
    """Train the recipe with its plan, and on one rank, from each seed until its target, and judge the samples.

    Args:
        seeds: of the trainings, each of which is done with the plan and on one rank.
        margin: how many more samples the plan may need, as a share of those of one rank.
    """
    check_recipe(recipe)
    check_target(recipe, len(seeds))
    num_processes = recipe.mutable.plan.roles.num_processes
    alone = replace(recipe, mutable=replace(recipe.mutable, plan=Plan()))
    with use_determinism(), use_threads(threads_per_rank(num_processes)):
        splits = build_splits(recipe)
        reference = count_samples(alone, splits, seeds, SoloReplicas())
    check_reference(reference)
    arguments = {"recipe": recipe.to_dict(), "seeds": list(seeds)}
    try:
        found = run_ranks(RankProgram("weft.proving.convergence:samples_of_rank", arguments), num_processes)[0]
    except RankFailedError as error:
        if error.exit_code != TrainingError.exit_code:
            raise
        failed = judge_convergence([math.inf] * len(seeds), reference, margin=margin)
        return replace(failed, finding=f"{failed.finding}; {error}")
    return judge_convergence([math.inf if n is None else n for n in found], reference, margin=margin)


def samples_of_rank(recipe: dict[str, object], seeds: list[int]) -> list[float | None]:
    """The rank program of the gate. JSON has no infinity: a target that was not reached is None."""
    chosen = Recipe.from_dict(recipe)
    place = LaunchedPlace().on(chosen.mutable.device)
    with realise(chosen.mutable.plan, place, RunSpec.of(chosen, seeds)) as replicas:
        if replicas is None:
            return []
        with use_determinism():
            found = count_samples(chosen, build_splits(chosen), seeds, replicas, place.device)
    return [value if math.isfinite(value) else None for value in found]


def count_samples(
    recipe: Recipe,
    splits: Splits,
    seeds: Sequence[int],
    replicas: AbstractReplicas,
    device: torch.device | None = None,
) -> list[float]:
    """Samples until the target from each seed; infinity where it was not reached, or where one rank diverged."""
    counts = []
    for seed in seeds:
        task, state = build_task(recipe, splits, seed, replicas, device)
        replicas.join(state.model)
        history = History()
        try:
            train(task, state, emit=history, save=_keep_nothing)
        except DivergedError:
            if replicas.mesh.num_ranks > 1:  # the ranks have lost each other, and no other seed can be trained
                raise
        counts.append(to_target(history.evaluations, recipe.fixed.target)["samples_to_target"])
    return counts


def _keep_nothing(_state: TrainingState) -> None:
    pass
