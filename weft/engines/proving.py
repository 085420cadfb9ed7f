"""Proofs on real ranks: each rank traces its steps, the process that asked compares them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weft.distributed.consistency.proof import compare_replicas, first_step_of, steps_needed, trace_replicas
from weft.distributed.placement import carry_out
from weft.distributed.proof import Proof, Trace, compare_traces, trace_ranks, trace_reference
from weft.engines.local import run_ranks, threads_per_rank
from weft.engines.meeting import meet
from weft.engines.place import find_place
from weft.engines.rank_program import RankProgram
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.datasets import Splits
from weft.training.loop import Task, TrainingState
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["begin_apart", "prove", "trace_rank"]


def prove(recipe: Recipe, *, seed: int = 0, num_steps: int = 5, tolerance: float = 1e-5) -> Proof:
    """Train some steps of the recipe on the ranks of its plan and on one, and compare every parameter after each.

    Of a relaxed plan every rank is compared with its replica in the equations of the plan's consistency, for at least
    as many steps as show two meetings.
    """
    check_recipe(recipe)
    plan = parse_plan(recipe.mutable.plan)
    choice, is_relaxed = plan.consistency, plan.consistency.name != "sync"
    num_steps = steps_needed(choice, num_steps) if is_relaxed else num_steps
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        arguments = {"recipe": recipe.to_dict(), "folder": folder, "seed": seed, "num_steps": num_steps}
        arguments["first_step"] = first_step_of(choice) if is_relaxed else 0
        run_ranks(RankProgram("weft.engines.proving:trace_rank", arguments), plan.num_ranks)
        traces = [_read_trace(Path(folder), rank, num_steps) for rank in range(plan.num_ranks)]
    with use_determinism(), use_threads(threads_per_rank(plan.num_ranks)):
        splits = build_splits(recipe)
        if is_relaxed:
            references = trace_replicas(recipe, splits, seed, num_steps, plan.num_ranks, choice)
            return compare_replicas(traces, references, tolerance)
        reference = trace_reference(recipe, splits, seed, num_steps, plan.num_ranks)
    return compare_traces(traces, reference, tolerance)


def begin_apart(
    recipe: Recipe, splits: Splits, seed: int, num_steps: int, replicas: AbstractReplicas
) -> tuple[Task, TrainingState]:
    """Some global batches for one of the ranks, which begin with other weights than rank 0: joining must mend that."""
    task, state = build_task(recipe, splits, seed, replicas)
    task = replace(task, total_samples=num_steps * task.sampler.batch_size, target=None)
    with torch.no_grad():
        for parameter in state.model.parameters.values():
            parameter.add_(replicas.rank)
    replicas.join(state.model)
    return task, state


@contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    """A matrix product over another number of threads adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def trace_rank(recipe: dict[str, object], folder: str, seed: int, num_steps: int, first_step: int) -> None:
    """The rank program of a proof: leaves this rank's trace in the folder."""
    chosen = Recipe.from_dict(recipe)
    group = meet(find_place())
    try:
        replicas = carry_out(parse_plan(chosen.mutable.plan), group)
        with use_determinism():
            trace = trace_ranks(chosen, build_splits(chosen), seed, num_steps, replicas, first_step)
        for step, parameters in enumerate(trace):
            save_file(parameters, _trace_file(Path(folder), group.rank, step))
    finally:
        group.close()


def _read_trace(folder: Path, rank: int, num_steps: int) -> Trace:
    return [load_file(_trace_file(folder, rank, step)) for step in range(num_steps)]


def _trace_file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank-{rank}-step-{step}.safetensors"
