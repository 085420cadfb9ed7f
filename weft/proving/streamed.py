"""Proof of PipeDream: every stage after every step, to the last bit, against a simulation without stages or stashes.

    W_s[k]    the weights of stage s after the minibatches 0 .. k-1
    g_t       the gradient of minibatch t, all of it, at weights of different ages: W_s[k_s(t)] of each stage s

        k_s(t) = max(0, t - n + s + 1)     own versions
                 max(0, t - n + 1)         vertical sync
        W_s[t + 1] = W_s[t], updated with the part of g_t that is stage s's

    after step t of the loop stage s holds W_s[max(0, t - n + s + 2)], and W_s[T] when the pipeline has been drained

The reference computes one gradient after the other with the whole model in one process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.proof import Proof, Trace, clone, compare_all, copy_of, failed, pack_trace, unpack_trace
from weft.proving.reference import (
    Replica,
    add_weighted,
    gradients_at,
    place_before_the_end,
    replicas_of,
    share_of,
    spoil,
    update_of,
    weigh_shares,
)
from weft.specs import Plan
from weft.training.build import build_task
from weft.training.loop import Task, TrainingState, take_step
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas

__all__ = ["Streamed", "trace_stage"]


@final
class Streamed(AbstractMethod):
    """For stages that update at different times."""

    @property
    def num_runs(self) -> int:
        return 1

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        """Enough for the pipeline to be full, and for what comes after it: 20 at least."""
        return max(num_steps, 20, 3 * plan.pipeline)

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        return pack_trace(trace_stage(case, replicas))

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        traces = [unpack_trace(found) for found in runs[0].ranks]
        meshes = [case.plan.mesh(rank) for rank in range(case.plan.num_ranks)]
        stages = [mesh.coordinate("pipeline") for mesh in meshes]
        names = {stage: {_owner(name) for name in trace[-1]} for stage, trace in zip(stages, traces, strict=True)}
        reference = _Reference(case, [names[stage] for stage in range(case.plan.pipeline)])
        held = []
        for rank, (trace, stage) in enumerate(zip(traces, stages, strict=True)):
            expected = reference.trace(stage)
            if [step.keys() for step in trace] != [step.keys() for step in expected]:
                return failed(f"rank {rank} did not trace the steps and tensors of its stage", case.num_steps, 0.0)
            for step, (own, wanted) in enumerate(zip(trace, expected, strict=True)):
                when = "when drained" if step == case.num_steps else f"after step {step + 1}"
                held.append((f"{when}, rank {rank} of stage {stage}: ", own, wanted))
        tolerance = case.tolerance if case.plan.splits_tensors else 0.0  # sums over parts of layers round differently
        found = compare_all(held, tolerance)
        if found.off:
            return failed(found.off, case.num_steps, tolerance, found.largest)
        shown = f"{case.plan.pipeline} stages followed the simulation of their stashes for {case.num_steps} steps"
        return Proof(True, found.is_bitwise, case.num_steps, found.largest, tolerance, f"{shown}, {found.how}")


def trace_stage(case: Case, replicas: AbstractReplicas) -> Trace:
    """Train some steps as one of the ranks: its own weights and slots after each, and when the pipeline is empty."""
    task, state = build_task(case.recipe, case.splits, case.seed, replicas, case.device, case.dtype)
    spoil(state, replicas)
    replicas.join(state.model)
    state = replace(state, sampler=place_before_the_end(task, case.num_steps))
    trace: Trace = []
    for _ in range(case.num_steps):
        state, _ = take_step(task, state)
        trace.append(copy_of(state.model.parameters, state.optimizer))
        replicas.agree_to_stop(False)
        replicas.agree_to_save(False)
    with replicas.use_consensus(state.model):
        trace.append(copy_of(state.model.parameters, replicas.collect(state.optimizer)))
    replicas.sum(torch.zeros(1))  # nobody leaves before all have traced
    return trace


@dataclass
class _Version:
    """The weights of one stage after some minibatches, and its optimizer's state then."""

    weights: dict[str, Tensor]
    optimizer: OptimizerState


@final
class _Reference:
    """Args:
    names: of the parameters of each stage.
    """

    def __init__(self, case: Case, names: Sequence[set[str]]) -> None:
        self._plan, self._num_steps = case.plan, case.num_steps
        task, state = build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
        self._stages = [[_part(state, own)] for own in names]
        self._run(task, state, case)

    def trace(self, stage: int) -> Trace:
        """Of a stage, after each step of the loop, and at the end."""
        num_stages, versions = self._plan.pipeline, self._stages[stage]
        ages = [max(0, step - num_stages + stage + 2) for step in range(self._num_steps)]
        return [copy_of(versions[age].weights, versions[age].optimizer) for age in (*ages, self._num_steps)]

    def _run(self, task: Task, state: TrainingState, case: Case) -> None:
        num_replicas = self._plan.num_replicas
        replicas = replicas_of(state, case.seed, num_replicas)
        place, samples = place_before_the_end(task, case.num_steps), 0
        for step in range(case.num_steps):
            batches = [share_of(task, place, part, num_replicas) for part in range(num_replicas)]
            weights, optimizer = self._seen_by(step, state.optimizer)
            total: dict[str, Tensor | None] = {}
            for replica, batch, share in zip(replicas, batches, weigh_shares(batches), strict=True):
                replica.weights, replica.optimizer = clone(weights), optimizer
                add_weighted(total, gradients_at(task, state.model, replica, batch, num_micro=1), share)
            for versions in self._stages:
                versions.append(_updated(task, versions[-1], total, samples))
            samples += sum(map(len, batches))
            _, place = task.sampler.next_batch(place)

    def _seen_by(self, minibatch: int, like: OptimizerState) -> tuple[dict[str, Tensor], OptimizerState]:
        """The weights of all stages that a minibatch meets, and the states of their optimizers, which may look ahead
        from them."""
        num_stages = self._plan.pipeline
        is_vertical = self._plan.schedule["sync"] == "vertical"
        weights: dict[str, Tensor] = {}
        slots: dict[str, Mapping[str, Tensor]] = {}
        for stage, versions in enumerate(self._stages):
            version = versions[max(0, minibatch - num_stages + 1 + (0 if is_vertical else stage))]
            weights |= version.weights
            slots |= version.optimizer.slots
        return weights, replace(like, slots=slots)


def _part(state: TrainingState, names: set[str]) -> _Version:
    weights = {name: tensor for name, tensor in state.model.parameters.items() if name in names}
    slots = {name: own for name, own in state.optimizer.slots.items() if name in names}
    return _Version(clone(weights), replace(state.optimizer, slots={name: clone(own) for name, own in slots.items()}))


def _updated(task: Task, version: _Version, gradients: Mapping[str, Tensor | None], samples: int) -> _Version:
    """The next version: a copy, as the one before is met by minibatches that come."""
    slots = {name: clone(own) for name, own in version.optimizer.slots.items()}
    replica = Replica(clone(version.weights), replace(version.optimizer, slots=slots), torch.empty(0))
    own = {name: gradients.get(name) for name in version.weights}
    optimizer = update_of(task, replica, samples).apply(own)
    return _Version(replica.weights, optimizer)


def _owner(name: str) -> str:
    """
    >>> _owner("fc.weight"), _owner("fc.weight (velocity)")
    ('fc.weight', 'fc.weight')
    """
    return name.partition(" (")[0]
