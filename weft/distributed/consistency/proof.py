"""Proof that ranks keep a relaxed consistency: all replicas trained in one process by the papers' equations.

    ranks       rank 0: x_0, rank 1: x_1, ...      each traced by itself, on a group, with messages
    reference   X = [x_0, x_1, ...]                one list in one process, no group, no messages, no scheme

The reference knows nothing of what it judges (equations.py). A tensor that is the same in its replicas, to the last
bit, must be so in the ranks too.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.distributed.consistency.equations import EQUATIONS, AbstractEquations, Replica, clone
from weft.distributed.proof import (
    Proof,
    Trace,
    add_weighted,
    begin_late,
    copy_of,
    gradients_at,
    place_before_the_end,
    random_of,
    relative_error,
    weigh_shares,
)
from weft.graph import State
from weft.specs import Batch
from weft.specs.plan import Choice
from weft.training.build import build_task
from weft.training.datasets import Splits
from weft.training.gradients import use_point
from weft.training.loop import Task
from weft.training.optimizers import OptimizerState
from weft.training.recipe import Recipe
from weft.training.replicas import Update
from weft.training.sampling import share

__all__ = ["compare_replicas", "first_step_of", "steps_needed", "trace_replicas"]


def steps_needed(choice: Choice, num_steps: int) -> int:
    """Enough steps to see two meetings and what follows them, and the last synchronous step where there are some."""
    period = int(dict(choice.parameters).get("steps", 1))
    return max(num_steps, 2 * period + 1 + (_after(choice) > 0))


def first_step_of(choice: Choice) -> int:
    """The step from which to trace: the last synchronous one, where there are some."""
    return max(0, _after(choice) - 1)


def _after(choice: Choice) -> int:
    return int(dict(choice.parameters).get("after", 0))


def trace_replicas(
    recipe: Recipe, splits: Splits, seed: int, num_steps: int, num_ranks: int, choice: Choice
) -> list[Trace]:
    """The trace of every replica, in the order of ranks."""
    task, state = build_task(recipe, splits, seed)
    first, after = first_step_of(choice), _after(choice)
    start = begin_late(state.optimizer, first)
    replicas = [
        Replica(clone(state.model.parameters), _clone_state(start), random_of(seed, rank)) for rank in range(num_ranks)
    ]
    state = replace(state, sampler=place_before_the_end(task, num_steps))
    equations = EQUATIONS[choice.name](choice, replicas)
    traces: list[Trace] = [[] for _ in replicas]
    for step in range(first, first + num_steps):
        indices, sampler = task.sampler.next_batch(state.sampler)
        shares = [share(indices, rank, num_ranks) for rank in range(num_ranks)]
        batches = [task.splits.train.take(own, state.sampler.epoch) for own in shares]
        gradients: list[dict[str, Tensor | None]] = []
        for replica, batch in zip(replicas, batches, strict=True):
            gradients.append(_gradients(task, replica, state.model, batch))
        lr = task.optimizer.lr * task.schedule(state.samples)
        counts = weigh_shares(batches)
        _update_all(task, replicas, equations, gradients, counts, lr, step - after)
        state = replace(state, sampler=sampler, step=state.step + 1, samples=state.samples + len(indices))
        for trace, replica in zip(traces, replicas, strict=True):
            trace.append(copy_of(replica.weights, replica.optimizer))
    return traces


def _gradients(task: Task, replica: Replica, model: State, batch: Batch) -> dict[str, Tensor | None]:
    """Of the replica's own weights on its share; none where it has no samples."""
    if not len(batch):
        return {}
    with use_point(replica.weights, task.optimizer.prepare(replica.weights, replica.optimizer)):
        model = replace(model, parameters=replica.weights, random=replica.random)
        found, replica.random = gradients_at(task, model, batch)
    return found


def _update_all(
    task: Task,
    replicas: Sequence[Replica],
    equations: AbstractEquations,
    gradients: list[dict[str, Tensor | None]],
    counts: Sequence[float],
    lr: float,
    step: int,
) -> None:
    """One step of all; before step 0 they are synchronous."""
    if step < 0:
        total: dict[str, Tensor | None] = {}
        for found, count in zip(gradients, counts, strict=True):
            add_weighted(total, found, count)
        gradients = [total] * len(replicas)
    else:
        equations.before_update(step)
    for replica, found in zip(replicas, gradients, strict=True):
        update = Update(task.optimizer, replica.weights, replica.optimizer, lr, task.clip_norm)
        replica.optimizer = update.apply(found)
    if step >= 0:
        equations.after_update(step, counts)
    elif step == -1:
        equations.begin()


def compare_replicas(ranks: Sequence[Trace], references: Sequence[Trace], tolerance: float = 1e-5) -> Proof:
    """Every rank against its replica of the reference, after each step."""
    num_steps, largest, is_bitwise = len(references[0]), 0.0, True
    for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
        if [step.keys() for step in trace] != [step.keys() for step in reference]:
            finding = f"rank {rank} did not trace the steps and tensors of the reference"
            return Proof(False, False, num_steps, math.inf, tolerance, finding)
    for step in range(num_steps):
        for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
            for name, expected in reference[step].items():
                found = trace[step][name]
                is_bitwise = is_bitwise and torch.equal(found, expected)
                error, where = relative_error(found, expected)
                largest = max(largest, error)
                if not error <= tolerance:
                    what = f"{name}{where} of rank {rank} is off by {error:.3g} of its largest value"
                    return Proof(False, False, num_steps, largest, tolerance, f"after step {step + 1}, {what}")
                is_common = torch.equal(expected, references[0][step][name])
                if is_common and not torch.equal(found, ranks[0][step][name]):
                    finding = f"replicas differ after step {step + 1}: {name} of rank {rank} is not that of rank 0"
                    return Proof(False, False, num_steps, math.inf, tolerance, finding)
    how = "to the last bit" if is_bitwise else f"to {largest:.2g} of each tensor's largest value"
    finding = f"{len(ranks)} ranks followed the equations of their consistency for {num_steps} steps, {how}"
    return Proof(True, is_bitwise, num_steps, largest, tolerance, finding)


def _clone_state(state: OptimizerState) -> OptimizerState:
    return replace(state, slots={name: clone(slots) for name, slots in state.slots.items()})
