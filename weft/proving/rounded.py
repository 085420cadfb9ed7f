"""Proof of ranks whose activations are rounded on the way: every gradient, and every update, from where the ranks were.

    ranks        w0 --- g0 --> w1 --- g1 --> w2 ...          rounded between stages, and between parts of layers
                 |             |
    one rank     '-- g ~ g0    '-- g ~ g1                    at the ranks' own weights, exact
                 '-- update(w0, g0) = w1                     with the ranks' own gradient

Errors of rounding grow from step to step, and Adam takes a full step for a gradient that is hardly there: a tolerance
for weights after some steps would let anything pass. From the ranks' own weights a gradient is off by no more than one
step's rounding, and the update that is made of it is held to be that of one rank, as in every other proof.

How far a gradient may be off follows from the largest error e of one number, as a share of the largest of its tensor.
Where layers are smooth it is off by about e. Where they have kinks (ReLU, max pooling) a share of about e of all
numbers comes to lie on the other side, and each of these has another gradient: it is off by about sqrt(e). Bounds, of
L2 norms; the constants are not derived, but set above what was seen of these nets:

                              bound         fp16    bf16   linear8  tree8
    e                                       1/2048  1/256  1/254    1/140
    all gradients together    2 sqrt(e)     0.044   0.125  0.125    0.17
    each tensor               5 sqrt(e)     0.11    0.31   0.31     0.42     small ones count as 3% of all
    loss                      8 e           0.004   0.03   0.03     0.06

    seen, all and each        GPT           0.0003  0.001  0.004    0.005
                                            0.001   0.002  0.010    0.015
                              residual      0.013   0.06   0.09     0.15     of two channels, cut by rows
                                            0.023   0.19   0.28     0.36
    seen of gradients that    GPT                          0.17
    went to other samples                                  0.72

What is whole on several ranks must have the same bits on all of them: each leaves its own, and not one for all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.proving.lockstep import take_traced_steps
from weft.proving.method import AbstractMethod, Case, Evidence
from weft.proving.noting import GRADIENT
from weft.proving.proof import (
    Proof,
    TensorComparison,
    Trace,
    clone,
    compare_all,
    copy_of,
    copy_to_host,
    error_of,
    failed,
    pack_trace,
    unpack_trace,
)
from weft.proving.reference import (
    Replica,
    add_weighted,
    gradients_at,
    place_before_the_end,
    replicas_of,
    share_of,
    weigh_shares,
)
from weft.specs import Batch, Plan
from weft.specs.loading import load
from weft.specs.plan import value_of
from weft.training.build import build_task
from weft.training.gradients import clip_by_norm
from weft.training.loop import Task, TrainingState
from weft.training.replicas import AbstractReplicas

__all__ = ["Rounded", "check_rounded", "gradient_bound", "step_of"]

_OWN = "own/"
_EACH, _LEAST_SHARE = 2.5, 0.03  # of one tensor: its bound to that of all, and the share of all that it counts as


def step_of(plan: Plan) -> float:
    """The largest error of a number of a plan's activations, as a share of the largest of its tensor; 0 if exact."""
    found: float = load(value_of("activations", plan.activations).equations["all_reduce"])
    return found


def gradient_bound(plan: Plan) -> float:
    """How far all gradients together may be off, as a share of their norm."""
    return 2 * math.sqrt(step_of(plan))


def check_rounded(plan: Plan) -> None:
    """Refuse to prove what has no gradient of one rank to compare with.

    Raises:
        UsageError: ranks do not meet in every step, or round gradients too.
    """
    is_in_step = plan.is_synchronous and plan.channel == "all_reduce" and not plan.is_streamed
    if not is_in_step or plan.compress != Plan().compress or plan.measured_every is not None:
        raise UsageError(
            f"rounded activations are proved of synchronous ranks in a group, with equal shares and exact gradients "
            f"({plan}); prove the plan without activations, or these without the rest"
        )


@final
class Rounded(AbstractMethod):
    """For synchronous ranks that send activations in a format of fewer bits."""

    @property
    def num_runs(self) -> int:
        return 1

    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        return num_steps

    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        trace: Trace = []
        own: dict[str, Tensor] = {}
        for step, (state, found) in enumerate(take_traced_steps(case, replicas), start=1):
            trace.append(found)
            cut_of = replicas.placement.cut_of
            whole = {n: p for n, p in state.model.parameters.items() if cut_of(f"parameter/{n}") is None}
            own |= {f"{_OWN}{step}/{name}": tensor for name, tensor in copy_to_host(whole).items()}
        return pack_trace(trace) | own

    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof:
        ranks = runs[0].ranks
        apart = _first_apart(ranks)
        if apart:
            return failed(apart, case.num_steps, 0.0)
        return _judge_trace(case, unpack_trace(ranks[0]))


def _judge_trace(case: Case, trace: Trace) -> Proof:
    """That of rank 0, which all have, against one rank, step by step."""
    allowed = max(case.tolerance, gradient_bound(case.plan))
    largest, updates = 0.0, TensorComparison(0.0, True)
    for number, (found, (gradients, loss, update)) in enumerate(
        zip(trace, _expected_steps(case, trace), strict=True), start=1
    ):
        error, off = _gradient_error(gradients, found, allowed)
        largest = max(largest, error)
        updates = _worse_of(updates, compare_all([("", found, update)], case.tolerance))
        loss_error = error_of(found["loss"], loss)[0]
        if off:
            return _failed(case, number, off, largest)
        if not loss_error <= max(case.tolerance, 8 * step_of(case.plan)):
            return _failed(case, number, f"the loss is off by {loss_error:.3g} of itself", largest)
        if updates.off:
            return _failed(case, number, f"the ranks' gradient should give another update: {updates.off}", largest)
    shown = (
        f"{case.plan.num_ranks} ranks, whose activations are rounded, took the gradient of one rank at their own "
        f"weights to {largest:.2g} of its norm, in each of {case.num_steps} steps, and updated with it as "
        f"one rank does, {updates.how}"
    )
    return Proof(True, False, case.num_steps, largest, allowed, shown)


def _worse_of(one: TensorComparison, other: TensorComparison) -> TensorComparison:
    return TensorComparison(max(one.largest, other.largest), one.is_bitwise and other.is_bitwise, one.off or other.off)


def _failed(case: Case, step: int, finding: str, largest: float) -> Proof:
    bound = max(case.tolerance, gradient_bound(case.plan))
    return failed(f"after step {step}, {finding}", case.num_steps, bound, largest)


_Expected = tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]
"""Gradients and the loss at the weights before a step; weights and slots after it, by the gradients that were found."""


def _expected_steps(case: Case, trace: Trace) -> Iterator[_Expected]:
    task, state = build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
    num_replicas = case.plan.num_replicas
    replicas = replicas_of(state, case.seed, num_replicas)
    whole = Replica(clone(state.model.parameters), replicas[0].optimizer, replicas[0].random)
    place, samples = place_before_the_end(task, case.num_steps), 0
    for found in trace:
        batches = [share_of(task, place, part, num_replicas) for part in range(num_replicas)]
        for replica in replicas:
            replica.weights, replica.optimizer = whole.weights, whole.optimizer
        gradients, loss = _mean_gradient(case, task, state, replicas, batches)
        lr = task.optimizer.lr * task.schedule(samples)
        noted = {name: found.get(f"{name} ({GRADIENT})") for name in whole.weights}
        whole.optimizer = task.optimizer.update(noted, whole.weights, whole.optimizer, lr)
        yield gradients, loss, copy_of(whole.weights, whole.optimizer)
        _stand_at(whole, found)
        samples += sum(map(len, batches))
        _, place = task.sampler.next_batch(place)


def _mean_gradient(
    case: Case, task: Task, state: TrainingState, replicas: Sequence[Replica], batches: Sequence[Batch]
) -> tuple[dict[str, Tensor], Tensor]:
    """Over all shares, clipped; and the loss."""
    num_micro = case.plan.num_micro_batches if case.plan.pipeline > 1 else None
    total: dict[str, Tensor | None] = {}
    loss = 0.0
    for replica, batch, count in zip(replicas, batches, weigh_shares(batches), strict=True):
        add_weighted(total, gradients_at(task, state.model, replica, batch, num_micro), count)
        loss += count * replica.loss
    clipped = total if task.clip_norm is None else clip_by_norm(total, task.clip_norm)
    named = {f"{name} ({GRADIENT})": gradient for name, gradient in clipped.items() if gradient is not None}
    return named, torch.tensor(loss, dtype=torch.float64)


@torch.no_grad()
def _stand_at(whole: Replica, found: Mapping[str, Tensor]) -> None:
    """Where the ranks are, so that no error is carried from step to step."""
    for name, weight in whole.weights.items():
        weight.copy_(found[name])
    for name, slots in whole.optimizer.slots.items():
        for slot, tensor in slots.items():
            tensor.copy_(found[f"{name} ({slot})"])


def _gradient_error(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], allowed: float) -> tuple[float, str]:
    """Of all together, as a share of their norm; and the first that is off by more than is allowed."""
    norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
    errors = {name: float((found[name].double() - tensor.double()).norm()) for name, tensor in expected.items()}
    total = math.hypot(*norms.values()) or 1.0
    whole = math.hypot(*errors.values()) / total
    for name, error in errors.items():
        own = error / max(norms[name], _LEAST_SHARE * total)
        if not own <= _EACH * allowed:
            return whole, f"{name} is off by {own:.3g} of its norm"
    return whole, "" if whole <= allowed else f"gradients are off by {whole:.3g} of their norm"


def _first_apart(ranks: Sequence[Mapping[str, Tensor]]) -> str:
    """Of what several ranks hold, each its own, and of the whole that was put together."""
    first: dict[str, tuple[int, Tensor]] = {}
    for rank, found in enumerate(ranks):
        for key, tensor in found.items():
            holder, held = first.setdefault(key, (rank, tensor))
            if not torch.equal(held, tensor):
                name = key.removeprefix(_OWN).partition("/")[2]
                return f"replicas differ: {name} of rank {rank} is not that of rank {holder}"
    return ""
