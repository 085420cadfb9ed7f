"""Proof of ranks in one group: the same global batches in one process, every rank compared after every step.

    ranks       g0 -.
                g1 --+-> exchange -> update          reference    w0*g0 + w1*g1 + w2*g2 -> update
                g2 -'                                             q(q(w0*g0) + q(w1*g1) + ...) with a codec q;
                                                                  at servers q(w), w of q(g0)*w0 + q(g1)*w1 + ...

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
from weft.proving.proof import Proof, Trace, clone, copy_of, error_of, failed, pack_trace, unpack_trace
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
from weft.proving.relaxed_equations import AbstractEquations
from weft.proving.rounding import Rounding, hop_error, round_all, rounding_of
from weft.specs import Plan
from weft.specs.devices import find_device
from weft.specs.loading import load
from weft.specs.plan import value_of
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
        if plan.is_synchronous:
            return num_steps
        return max(num_steps, 2 * plan.period + 1 + (plan.num_synchronous_steps > 0))

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        return pack_trace(trace_ranks(case, replicas))

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        device = case.device or find_device(case.recipe.mutable.device)
        case = replace(case, tolerance=max(case.tolerance, hop_error(case.plan, device)))
        return compare_ranks([unpack_trace(found) for found in runs[0].ranks], trace_references(case), case)


def first_step_of(plan: Plan) -> int:
    """The step from which to trace: the last synchronous one, where there are some."""
    return max(0, plan.num_synchronous_steps - 1)


def _equations_of(plan: Plan, replicas: Sequence[Replica]) -> AbstractEquations | None:
    """Of a relaxed plan, as the table of axes names them."""
    if plan.is_synchronous:
        return None
    found: AbstractEquations = load(value_of("consistency", plan.consistency).equations["all_reduce"])(
        plan.consistency, replicas, rounding_of(plan)
    )
    return found


def trace_ranks(case: Case, replicas: AbstractReplicas) -> Trace:
    """Train some steps as one of the ranks."""
    task, state = build_task(case.recipe, case.splits, case.seed, replicas, case.device)
    spoil(state, replicas)
    replicas.join(state.model)
    first = first_step_of(case.plan)
    if first:
        replicas.remember(first, {})
        state = replace(state, optimizer=begin_late(state.optimizer, first))
    state = replace(state, sampler=place_before_the_end(task, case.num_steps))
    trace: Trace = []
    for _ in range(case.num_steps):
        state, _ = take_step(task, state)
        whole = replicas.placement.whole_state(replicas.collect(state.optimizer))
        trace.append(copy_of(state.model.parameters, whole))
    replicas.sum(torch.zeros(1))  # nobody leaves before all have traced
    return trace


def trace_references(case: Case) -> list[Trace]:
    """The trace of every replica, in their order."""
    task, state = build_task(case.recipe, case.splits, case.seed)
    plan, num_replicas = case.plan, case.plan.num_replicas
    first, after = first_step_of(plan), plan.num_synchronous_steps
    state = replace(state, optimizer=begin_late(state.optimizer, first)) if first else state
    replicas = replicas_of(state, case.seed, num_replicas)
    equations = _equations_of(plan, replicas)
    together = Together(plan, replicas)
    place, samples = place_before_the_end(task, case.num_steps), 0
    traces: list[Trace] = [[] for _ in replicas]
    for step in range(first, first + case.num_steps):
        batches = [share_of(task, place, part, num_replicas) for part in range(num_replicas)]
        gradients = [gradients_at(task, state.model, *pair) for pair in zip(replicas, batches, strict=True)]
        counts = weigh_shares(batches)
        if equations is None:
            together.update(task, gradients, counts, samples)
        else:
            _update_all(task, replicas, equations, together, gradients, counts, samples, step - after)
        samples += sum(map(len, batches))
        _, place = task.sampler.next_batch(place)
        for trace, replica in zip(traces, replicas, strict=True):
            trace.append(copy_of(replica.weights, replica.optimizer))
    return traces


Gradients = list[dict[str, Tensor | None]]


@final
class Together:
    """Synchronous steps: one rank's update, with the gradient of the whole batch, is that of all.

    At servers the ranks hold what they were sent of the weights, which the servers keep as they are.
    """

    def __init__(self, plan: Plan, replicas: Sequence[Replica]) -> None:
        self._round = rounding_of(plan)
        self._is_served = plan.channel == "servers"
        self._replicas = replicas
        first = replicas[0]
        self._whole = Replica(clone(first.weights), first.optimizer, first.random) if self._is_served else first
        if self._is_served:
            self._share()

    def update(self, task: Task, gradients: Gradients, counts: Sequence[float], samples: int) -> None:
        self._whole.optimizer = update_of(task, self._whole, samples).apply(self.sum(gradients, counts))
        self._share()

    def _share(self) -> None:
        weights = self._whole.weights
        for replica in self._replicas if self._is_served else self._replicas[1:]:
            replica.weights = round_all(self._round, weights) if self._is_served else weights
            replica.optimizer = self._whole.optimizer

    def sum(self, gradients: Gradients, counts: Sequence[float]) -> dict[str, Tensor | None]:
        """Of what ranks sent: servers weigh it; ranks of a group weigh it themselves, and are sent the sum."""
        total: dict[str, Tensor | None] = {}
        for found, count in zip(gradients, counts, strict=True):
            if self._is_served:
                add_weighted(total, _each(self._round, found), count)
            else:
                weighted: dict[str, Tensor | None] = {}
                add_weighted(weighted, found, count)
                add_weighted(total, _each(self._round, weighted), 1.0)
        return total if self._is_served else _each(self._round, total)


def _each(rounding: Rounding, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if gradient is None else rounding(gradient) for name, gradient in gradients.items()}


def _update_all(
    task: Task,
    replicas: Sequence[Replica],
    equations: AbstractEquations,
    together: Together,
    gradients: Gradients,
    counts: Sequence[float],
    samples: int,
    step: int,
) -> None:
    """One step of all; before step 0 they are synchronous."""
    if step < 0:
        gradients = [together.sum(gradients, counts)] * len(replicas)
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
    if case.plan.is_synchronous:
        return f"{case.plan.num_ranks} ranks gave the parameters of one rank after each of {num_steps} steps"
    return f"{case.plan.num_ranks} ranks followed the equations of their consistency for {num_steps} steps"
