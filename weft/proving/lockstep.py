"""Proof of ranks in one group: the same global batches in one process, every rank compared after every step.

    ranks       g0 -.
                g1 --+-> exchange -> update          reference    w0*g0 + w1*g1 + w2*g2 -> update
                g2 -'

    ranks of a relaxed plan     rank 0: x_0, rank 1: x_1, ...      each traced by itself, on a group, with messages
    reference                   X = [x_0, x_1, ...]                one list in one process, by the papers' equations

The reference is written without any of the code that it judges: no group, no messages, no scheme. A tensor that is the
same in its replicas, to the last bit, must be so in the ranks too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.proof import Proof, Trace, copy_of, error_of, failed, pack_trace, unpack_trace
from weft.proving.reference import (
    Replica,
    add_weighted,
    begin_late,
    gradients_at,
    place_before_the_end,
    replicas_of,
    share_of,
    spoil,
    update_of,
    weigh_shares,
)
from weft.proving.relaxed_equations import EQUATIONS, AbstractEquations
from weft.specs import Choice, Plan
from weft.training.build import build_task
from weft.training.loop import Task, take_step
from weft.training.replicas import AbstractReplicas

__all__ = ["Lockstep", "compare_ranks", "first_step_of", "trace_ranks", "trace_references"]


@final
class Lockstep(AbstractMethod):
    """For ranks that take the same steps, on the same global batches."""

    @property
    def num_runs(self) -> int:
        return 1

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        """Enough to see two meetings and what follows them, and the last synchronous step where there are some."""
        if plan.consistency.name == "sync":
            return num_steps
        period = int(plan.consistency.get("steps", 1))
        return max(num_steps, 2 * period + 1 + (_after(plan.consistency) > 0))

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        return pack_trace(trace_ranks(case, replicas))

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        return compare_ranks([unpack_trace(found) for found in runs[0].ranks], trace_references(case), case)


def first_step_of(choice: Choice) -> int:
    """The step from which to trace: the last synchronous one, where there are some."""
    return max(0, _after(choice) - 1)


def _after(choice: Choice) -> int:
    return int(choice.get("after", 0))


def trace_ranks(case: Case, replicas: AbstractReplicas) -> Trace:
    """Train some steps as one of the ranks."""
    task, state = build_task(case.recipe, case.splits, case.seed, replicas, case.device)
    spoil(state, replicas)
    replicas.join(state.model)
    first = first_step_of(case.plan.consistency)
    if first:
        replicas.remember(first, {})
        state = replace(state, optimizer=begin_late(state.optimizer, first))
    state = replace(state, sampler=place_before_the_end(task, case.num_steps))
    trace: Trace = []
    for _ in range(case.num_steps):
        state, _ = take_step(task, state)
        trace.append(copy_of(state.model.parameters, replicas.collect(state.optimizer)))
    replicas.sum(torch.zeros(1))  # nobody leaves before all have traced
    return trace


def trace_references(case: Case) -> list[Trace]:
    """The trace of every replica, in their order."""
    task, state = build_task(case.recipe, case.splits, case.seed)
    choice, num_replicas = case.plan.consistency, case.plan.num_replicas
    first, after = first_step_of(choice), _after(choice)
    state = replace(state, optimizer=begin_late(state.optimizer, first)) if first else state
    replicas = replicas_of(state, case.seed, num_replicas)
    equations = None if choice.name == "sync" else EQUATIONS[choice.name](choice, replicas)
    place, samples = place_before_the_end(task, case.num_steps), 0
    traces: list[Trace] = [[] for _ in replicas]
    for step in range(first, first + case.num_steps):
        batches = [share_of(task, place, part, num_replicas) for part in range(num_replicas)]
        gradients = [gradients_at(task, state.model, *pair) for pair in zip(replicas, batches, strict=True)]
        counts = weigh_shares(batches)
        if equations is None:
            _update_as_one(task, replicas, gradients, counts, samples)
        else:
            _update_all(task, replicas, equations, gradients, counts, samples, step - after)
        samples += sum(map(len, batches))
        _, place = task.sampler.next_batch(place)
        for trace, replica in zip(traces, replicas, strict=True):
            trace.append(copy_of(replica.weights, replica.optimizer))
    return traces


Gradients = list[dict[str, Tensor | None]]


def _sum(gradients: Gradients, counts: Sequence[float]) -> dict[str, Tensor | None]:
    total: dict[str, Tensor | None] = {}
    for found, count in zip(gradients, counts, strict=True):
        add_weighted(total, found, count)
    return total


def _update_as_one(
    task: Task, replicas: Sequence[Replica], gradients: Gradients, counts: Sequence[float], samples: int
) -> None:
    """One rank's update, with the gradient of the whole batch, is that of all."""
    first = replicas[0]
    first.optimizer = update_of(task, first, samples).apply(_sum(gradients, counts))
    for replica in replicas[1:]:
        replica.weights, replica.optimizer = first.weights, first.optimizer


def _update_all(
    task: Task,
    replicas: Sequence[Replica],
    equations: AbstractEquations,
    gradients: Gradients,
    counts: Sequence[float],
    samples: int,
    step: int,
) -> None:
    """One step of all; before step 0 they are synchronous."""
    if step < 0:
        gradients = [_sum(gradients, counts)] * len(replicas)
    else:
        equations.before_update(step)
    for replica, found in zip(replicas, gradients, strict=True):
        replica.optimizer = update_of(task, replica, samples).apply(found)
    if step >= 0:
        equations.after_update(step, counts)
    elif step == -1:
        equations.begin()


def compare_ranks(ranks: Sequence[Trace], references: Sequence[Trace], case: Case) -> Proof:
    """Every rank against its replica of the reference, after each step: replicas that are equal must be so to the last
    bit, the reference is met to the last bit, or else to the tolerance."""
    num_steps, tolerance, largest, is_bitwise = len(references[0]), case.tolerance, 0.0, True
    for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
        if [step.keys() for step in trace] != [step.keys() for step in reference]:
            return failed(f"rank {rank} did not trace the steps and tensors of the reference", num_steps, tolerance)
    for step in range(num_steps):
        apart = _first_apart([trace[step] for trace in ranks], [trace[step] for trace in references])
        if apart:
            return failed(f"replicas differ after step {step + 1}: {apart}", num_steps, tolerance)
        for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
            for name, expected in reference[step].items():
                found = trace[step][name]
                is_bitwise = is_bitwise and torch.equal(found, expected)
                error, where = error_of(found, expected)
                largest = max(largest, error)
                if not error <= tolerance:
                    what = f"{name}{where} of rank {rank} is off by {error:.3g} of its largest value"
                    return failed(f"after step {step + 1}, {what}", num_steps, tolerance, largest)
    how = "to the last bit" if is_bitwise else f"to {largest:.2g} of each tensor's largest value"
    return Proof(True, is_bitwise, num_steps, largest, tolerance, f"{_shown(case, num_steps)}, {how}")


def _first_apart(ranks: Sequence[Mapping[str, Tensor]], references: Sequence[Mapping[str, Tensor]]) -> str:
    """A tensor that should be equal on two ranks and is not."""
    for rank, (found, expected) in enumerate(zip(ranks, references, strict=True)):
        for name, tensor in expected.items():
            is_common = torch.equal(tensor, references[0][name])
            if is_common and not torch.equal(found[name], ranks[0][name]):
                return f"{name} of rank {rank} is not that of rank 0"
    return ""


def _shown(case: Case, num_steps: int) -> str:
    if case.plan.consistency.name == "sync":
        return f"{case.plan.num_ranks} ranks gave the parameters of one rank after each of {num_steps} steps"
    return f"{case.plan.num_ranks} ranks followed the equations of their consistency for {num_steps} steps"
