"""Proof of ranks in one group: the same global batches in one process, every rank compared after every step.

    ranks       g0 -.
                g1 --+-> exchange -> update          reference    w0*g0 + w1*g1 + w2*g2 -> update
                g2 -'                                             q(q(w0*g0) + q(w1*g1) + ...) with a codec q;
                                                                  at servers q(w), w of q(g0)*w0 + q(g1)*w1 + ...;
                                                                  lossy ones with a memory of each rank (compression)

    ranks of a relaxed plan     rank 0: x_0, rank 1: x_1, ...      each traced by itself, on a group, with messages
    reference                   X = [x_0, x_1, ...]                one list in one process, by the papers' equations

The reference is written without any of the code that it judges: no group, no messages, no scheme. A tensor that is the
same in its replicas, to the last bit, must be so in the ranks too.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.channels.share_log import read_speeds
from weft.proving.compressed_sums import CompressedSum, compression_error, is_lossy, sum_of_gradients, sum_of_weights
from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.noting import GRADIENT, NotingOptimizer
from weft.proving.proof import Proof, Trace, clone, copy_of, copy_to_host, error_of, failed, pack_trace, unpack_trace
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
from weft.proving.rounding import EXACT, Rounding, hop_error, round_all, rounding_of
from weft.specs import Plan
from weft.specs.devices import find_device
from weft.specs.loading import load
from weft.specs.plan import value_of
from weft.training.build import build_task
from weft.training.loop import Task, TrainingState, take_step
from weft.training.optimizers import OptimizerState, split_momentum
from weft.training.replicas import AbstractReplicas

_GRADIENT = f"({GRADIENT})"

AMPLIFICATION = 100.0
"""Of rounding in float32, by an optimizer: 1e-5 of a gradient, 1e-3 of a parameter."""

LEAST_COMPRESSED = 4
"""Steps in which numbers that were kept back are sent, and what that leaves is kept again."""

__all__ = [
    "Lockstep",
    "compare_ranks",
    "first_step_of",
    "take_traced_steps",
    "trace_ranks",
    "trace_references",
    "whole_of",
]


@final
class Lockstep(AbstractMethod):
    """For ranks that take the same steps, on the same global batches."""

    @property
    def num_runs(self) -> int:
        return 1

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        """Enough to see two meetings and what follows them, and the last synchronous step where there are some; of
        measured shares, some that are not equal; and of numbers that were kept back, some that are sent."""
        if plan.measured_every is not None:
            return max(num_steps, plan.measured_every + 2)
        if plan.is_synchronous:
            return max(num_steps, LEAST_COMPRESSED) if is_lossy(plan) else num_steps
        return max(num_steps, 2 * plan.period + 1 + (plan.num_synchronous_steps > 0))

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        return pack_trace(trace_ranks(case, replicas))

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        device = case.device or find_device(case.recipe.mutable.device)
        case = replace(case, tolerance=max(case.tolerance, hop_error(case.plan, device), compression_error(case.plan)))
        is_measured = case.plan.measured_every is not None
        recorded = read_speeds(runs[0].folder, case.seed) if is_measured else {}
        references = trace_references(case, {step: found.speeds for step, found in recorded.items()})
        of_ranks = [references[case.plan.mesh(rank).replica] for rank in range(case.plan.num_ranks)]
        return compare_ranks([unpack_trace(found) for found in runs[0].ranks], of_ranks, case)


def first_step_of(plan: Plan) -> int:
    """The step from which to trace: the last synchronous one, where there are some."""
    return max(0, plan.num_synchronous_steps - 1)


def _equations_of(plan: Plan, replicas: Sequence[Replica]) -> AbstractEquations | None:
    """Of a relaxed plan, as the table of axes names them."""
    if plan.is_synchronous:
        return None
    sent = sum_of_weights(plan, replicas[0].weights) if is_lossy(plan) else rounding_of(plan)
    found: AbstractEquations = load(value_of("consistency", plan.consistency).equations["all_reduce"])(
        plan.consistency, replicas, sent
    )
    return found


def trace_ranks(case: Case, replicas: AbstractReplicas) -> Trace:
    """Train some steps as one of the ranks."""
    return [found for _, found in take_traced_steps(case, replicas)]


def take_traced_steps(case: Case, replicas: AbstractReplicas) -> Iterator[tuple[TrainingState, dict[str, Tensor]]]:
    """As one of the ranks: its own state after each step, and the trace of the whole model."""
    task, state, noting = _noted(
        case, *build_task(case.recipe, case.splits, case.seed, replicas, case.device, case.dtype)
    )
    spoil(state, replicas)
    replicas.join(state.model)
    first = first_step_of(case.plan)
    if first:
        replicas.remember(first, {})
        state = replace(state, optimizer=begin_late(state.optimizer, first))
    state = replace(state, sampler=place_before_the_end(task, case.num_steps))
    for _ in range(case.num_steps):
        state, result = take_step(task, state)
        shown = noting.show(state.optimizer) if noting else replicas.collect(state.optimizer)
        yield state, whole_of(state.model.parameters, shown, replicas) | _loss(result.loss, noting)
    replicas.sum(torch.zeros(1))  # nobody leaves before all have traced


def _noted(case: Case, task: Task, state: TrainingState) -> tuple[Task, TrainingState, NotingOptimizer | None]:
    """Where ranks update, each with the sum of all gradients, these and the loss are traced too."""
    if not case.plan.is_synchronous or case.plan.channel == "servers":
        return task, state, None
    noting = NotingOptimizer(task.optimizer)
    return replace(task, optimizer=noting), state, noting


def _loss(loss: float, noting: NotingOptimizer | None) -> dict[str, Tensor]:
    return {"loss": torch.tensor(loss, dtype=torch.float64)} if noting else {}


def whole_of(
    parameters: Mapping[str, Tensor], optimizer: OptimizerState, replicas: AbstractReplicas
) -> dict[str, Tensor]:
    """As `copy_of`, of the whole model, of which this rank may hold a part."""
    held = {f"parameter/{name}": tensor for name, tensor in parameters.items()}
    for name, slots in optimizer.slots.items():
        held |= {f"slot/{name}/{slot}": tensor for slot, tensor in slots.items()}
    found = replicas.placement.whole(held)
    return copy_to_host({_shown_name(name): tensor for name, tensor in found.items()})


def _shown_name(entry: str) -> str:
    """
    >>> _shown_name("parameter/fc.weight"), _shown_name("slot/fc.weight/velocity")
    ('fc.weight', 'fc.weight (velocity)')
    """
    kind, _, name = entry.partition("/")
    return name if kind == "parameter" else "{} ({})".format(*name.rsplit("/", 1))


def trace_references(case: Case, speeds: Mapping[int, Sequence[int]] | None = None) -> list[Trace]:
    """The trace of every replica, in their order.

    Args:
        speeds: by which shares were dealt, by the steps from which on they counted; before them shares are equal.
    """
    task, state, momentum = _without_momentum(
        case.plan, *build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
    )
    task, state, noting = _noted(case, task, state)
    plan, num_replicas = case.plan, case.plan.num_replicas
    num_micro = plan.num_micro_batches if plan.pipeline > 1 else None
    first, after = first_step_of(plan), plan.num_synchronous_steps
    state = replace(state, optimizer=begin_late(state.optimizer, first)) if first else state
    replicas = replicas_of(state, case.seed, num_replicas)
    equations = _equations_of(plan, replicas)
    together = Together(plan, replicas, _sum_of(plan, state, momentum))
    place, samples = place_before_the_end(task, case.num_steps), 0
    traces: list[Trace] = [[] for _ in replicas]
    for step in range(first, first + case.num_steps):
        dealt = _speeds_at(step - first, speeds or {})
        batches = [share_of(task, place, part, num_replicas, dealt) for part in range(num_replicas)]
        gradients = [gradients_at(task, state.model, *pair, num_micro) for pair in zip(replicas, batches, strict=True)]
        counts = weigh_shares(batches)
        if equations is None:
            together.update(task, gradients, counts, samples)
        else:
            _update_all(task, replicas, equations, together, gradients, counts, samples, step - after)
        samples += sum(map(len, batches))
        _, place = task.sampler.next_batch(place)
        loss = sum(count * replica.loss for count, replica in zip(counts, replicas, strict=True))
        for trace, replica in zip(traces, replicas, strict=True):
            shown = noting.show(replica.optimizer) if noting else replica.optimizer
            trace.append(copy_of(replica.weights, shown) | _loss(loss, noting))
    return traces


def _without_momentum(plan: Plan, task: Task, state: TrainingState) -> tuple[Task, TrainingState, tuple[float, bool]]:
    """Where ranks keep the momentum of their gradients, the optimizer has none; it, and whether it is Nesterov's."""
    if not is_lossy(plan) or not value_of("compress", plan.compress).coding.takes_momentum:
        return task, state, (0.0, False)
    rest, momentum, is_nesterov = split_momentum(task.optimizer)
    begun = replace(state, optimizer=rest.init(state.model.parameters))
    return replace(task, optimizer=rest), begun, (momentum, is_nesterov)


def _sum_of(plan: Plan, state: TrainingState, momentum: tuple[float, bool]) -> CompressedSum | None:
    return sum_of_gradients(plan, state.model.parameters, momentum) if is_lossy(plan) else None


def _speeds_at(step: int, speeds: Mapping[int, Sequence[int]]) -> Sequence[int] | None:
    """
    >>> _speeds_at(3, {2: [1, 2], 4: [1, 1]}), _speeds_at(1, {2: [1, 2]})
    ([1, 2], None)
    """
    steps = sorted(speeds)
    number = bisect_right(steps, step)
    return speeds[steps[number - 1]] if number else None


Gradients = list[dict[str, Tensor | None]]


@final
class Together:
    """Synchronous steps: one rank's update, with the gradient of the whole batch, is that of all.

    At servers the ranks hold what they were sent of the weights, which the servers keep as they are.

    Args:
        compressed: the sum of gradients that ranks receive, where they do not round them one by one.
    """

    def __init__(self, plan: Plan, replicas: Sequence[Replica], compressed: CompressedSum | None = None) -> None:
        self._compressed = compressed
        self._round = EXACT if compressed else rounding_of(plan)
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
        if self._compressed is not None:
            return self._compressed(gradients, counts)
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
            steepest = _largest_gradient(reference[step])
            for name, expected in reference[step].items():
                found = trace[step][name]
                is_bitwise = is_bitwise and torch.equal(found, expected)
                error, where = error_of(found, expected)
                if name.endswith(_GRADIENT):
                    error *= float(expected.abs().max()) / steepest if expected.numel() and steepest else 1.0
                largest = max(largest, error)
                if not error <= tolerance * _amplification(name, case):
                    what = f"{name}{where} of rank {rank} is off by {error:.3g} of its largest value"
                    return failed(f"after step {step + 1}, {what}", num_steps, tolerance, largest)
    how = "to the last bit" if is_bitwise else f"to {largest:.2g} of each tensor's largest value"
    return Proof(True, is_bitwise, num_steps, largest, tolerance, f"{_shown(case, num_steps)}, {how}")


def _amplification(name: str, case: Case) -> float:
    """By how much more than a gradient what an update makes of it may be off. Where layers are split, or one product is
    made of the rows of all ranks, sums are made in another order, and Adam takes a full step for a gradient of rounding
    alone. In float64 that does not show."""
    is_made = name != "loss" and not name.endswith(_GRADIENT)
    is_reordered = case.plan.splits_layers or case.plan.shard > 1 or case.plan.sends_factors
    return AMPLIFICATION if is_made and is_reordered and case.dtype is None else 1.0


def _largest_gradient(tensors: Mapping[str, Tensor]) -> float:
    """Of all parameters: one that hardly matters (a bias before a norm, one of keys) has rounding for a gradient."""
    return max((float(t.abs().max()) for n, t in tensors.items() if n.endswith(_GRADIENT) and t.numel()), default=0.0)


def _first_apart(ranks: Sequence[Mapping[str, Tensor]], references: Sequence[Mapping[str, Tensor]]) -> str:
    """A tensor that should be equal on two ranks and is not."""
    for rank, (found, expected) in enumerate(zip(ranks, references, strict=True)):
        for name, tensor in expected.items():
            is_common = torch.equal(tensor, references[0][name])
            if is_common and not torch.equal(found[name], ranks[0][name]):
                return f"{name} of rank {rank} is not that of rank 0"
    return ""


def _shown(case: Case, num_steps: int) -> str:
    if case.plan.is_synchronous and is_lossy(case.plan):
        equations = f"the equations of compress={case.plan.compress}"
        return f"{case.plan.num_ranks} ranks gave the parameters of {equations} after each of {num_steps} steps"
    if case.plan.is_synchronous:
        return f"{case.plan.num_ranks} ranks gave the parameters of one rank after each of {num_steps} steps"
    return f"{case.plan.num_ranks} ranks followed the equations of their consistency for {num_steps} steps"
