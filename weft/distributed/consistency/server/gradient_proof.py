"""Proof that servers make of gradients what the equations say: where a recipe's training must end by its records."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from weft.distributed.consistency.equations import Replica, clone
from weft.distributed.consistency.server.cut import cut_evenly
from weft.distributed.consistency.server.decisions import Commit, Decision
from weft.distributed.consistency.server.gradient_equations import Computed, Setup, follow_gradients
from weft.distributed.consistency.server.settings import may_cut
from weft.distributed.proof import Proof, compare_all, copy_of, gradients_at, random_of
from weft.graph import State
from weft.specs import Batch, Plan
from weft.training.build import build_optimizer, build_task
from weft.training.datasets import Splits
from weft.training.gradients import use_point
from weft.training.loop import Task
from weft.training.optimizers import OptimizerState
from weft.training.recipe import Recipe
from weft.training.sampling import share

__all__ = ["compare_ends", "follow_recipe"]


def follow_recipe(
    recipe: Recipe, splits: Splits, seed: int, plan: Plan, records: Sequence[Sequence[Decision]]
) -> dict[str, Tensor]:
    """The parameters and slots at the end of a training of the recipe, updates being made as each shard recorded.

    Raises:
        CorruptFileError: the records are not of one training.
    """
    task, state = build_task(recipe, splits, seed)
    parameters = state.model.parameters
    trained = {name: p.detach() for name, p in parameters.items() if p.requires_grad}
    setup = Setup(
        parameters=parameters,
        make_optimizer=lambda: build_optimizer(recipe),
        cuts=cut_evenly(trained, int(plan.topology["shards"]), may_cut=may_cut(task.optimizer)),
        replicas=[Replica(clone(parameters), state.optimizer, random_of(seed, rank)) for rank in range(plan.num_ranks)],
        compute=lambda replica, batch, part: _compute(task, state.model, plan.num_ranks, replica, batch, part),
        clip_norm=task.clip_norm,
    )
    weights, slots = follow_gradients(plan, records, setup)
    return copy_of(weights, OptimizerState(state.optimizer.shared, slots))


def _compute(task: Task, model: State, size: int, replica: Replica, number: int, part: int) -> Computed:
    place = task.sampler.state_at(number)
    indices, _ = task.sampler.next_batch(place)
    batch = task.splits.train.take(share(indices, part, size), place.epoch)
    lr = task.optimizer.lr * task.schedule(task.sampler.samples_before(place))
    found: dict[str, Tensor | None] = {}
    if len(batch):
        with use_point(replica.weights, task.optimizer.prepare(replica.weights, replica.optimizer)):
            at = replace(model, parameters=replica.weights, random=replica.random)
            found, replica.random = gradients_at(task, at, batch)
    return Computed(found, _weigh(task, batch, indices), lr)


def _weigh(task: Task, batch: Batch, indices: Tensor) -> float:
    """How much a share counts in its batch: by targets where samples differ in them."""
    data = task.splits.train
    whole = data.take(indices).num_targets if data.has_padding() else 0
    return batch.num_targets / whole if whole else len(batch) / len(indices)


def compare_ends(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    records: Sequence[Sequence[Decision]],
    tolerance: float = 1e-5,
    what: str = "weights and optimizer state are",
) -> Proof:
    """What a training ended with against where the equations lead, parameters and slots alike."""
    num_updates = sum(isinstance(decision, Commit) for decisions in records for decision in decisions)
    if found.keys() != expected.keys():
        odd = min(found.keys() ^ expected.keys())
        finding = f"servers and equations differ in what they keep ({odd})"
        return Proof(False, False, num_updates, math.inf, tolerance, finding)
    compared = compare_all([("", found, expected)], tolerance)
    if compared.off:
        finding = f"{compared.off}, by the equations of what was recorded"
        return Proof(False, False, num_updates, compared.largest, tolerance, finding)
    finding = f"{what} where the equations lead from {num_updates} recorded updates, {compared.how}"
    return Proof(True, compared.is_bitwise, num_updates, compared.largest, tolerance, finding)
