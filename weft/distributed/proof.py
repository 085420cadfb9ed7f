"""Proof that N ranks compute what one rank computes: the same global batches, parameters compared after every step.

The reference is written without any of the code that it judges. It takes the shares of a batch one after the other in
one process and adds their gradients in the order of ranks:

    ranks       g0 -.
                g1 --+-> exchange -> update          reference    w0*g0 + w1*g1 + w2*g2 -> update
                g2 -'
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.graph import State
from weft.specs import Batch
from weft.training.build import build_task, derive_seed
from weft.training.datasets import Splits
from weft.training.gradients import gradients_of, use_point
from weft.training.loop import Task, TrainingState, take_step
from weft.training.optimizers import OptimizerState
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas, Update
from weft.training.sampling import SamplerState, share

__all__ = [
    "Comparison",
    "Proof",
    "Trace",
    "add_weighted",
    "begin_late",
    "compare_all",
    "compare_traces",
    "copy_of",
    "gradients_at",
    "place_before_the_end",
    "random_of",
    "relative_error",
    "trace_ranks",
    "trace_reference",
    "weigh_shares",
]

Trace = list[dict[str, Tensor]]
"""The parameters and the optimizer's slots after each step.

Slots, because parameters alone do not tell all: Adam takes the same step for a gradient as for twice that gradient.
"""


@dataclass(frozen=True)
class Proof:
    """What a comparison found. `largest_error` is relative to the largest value of its tensor."""

    passed: bool
    is_bitwise: bool
    num_steps: int
    largest_error: float
    tolerance: float
    finding: str  # in words: what was shown, or the first difference and where it is


def trace_ranks(
    recipe: Recipe, splits: Splits, seed: int, num_steps: int, replicas: AbstractReplicas, first_step: int = 0
) -> Trace:
    """Train some steps as one of the ranks. Ranks other than 0 begin with spoilt weights: rank 0's must reach them.

    Args:
        first_step: count from here, as if so many steps had been taken.
    """
    task, state = build_task(recipe, splits, seed, replicas)
    with torch.no_grad():
        for parameter in state.model.parameters.values():
            parameter.add_(replicas.mesh.rank)
    replicas.join(state.model)
    if first_step:
        replicas.remember(first_step, {})
        state = replace(state, optimizer=begin_late(state.optimizer, first_step))
    state = replace(state, sampler=place_before_the_end(task, num_steps))
    trace: Trace = []
    for _ in range(num_steps):
        state, _ = take_step(task, state)
        trace.append(copy_of(state.model.parameters, replicas.collect(state.optimizer)))
    return trace


def trace_reference(recipe: Recipe, splits: Splits, seed: int, num_steps: int, num_ranks: int) -> Trace:
    """The same steps in one process, without replicas, exchange or buckets."""
    task, state = build_task(recipe, splits, seed)
    randoms = [random_of(seed, rank) for rank in range(num_ranks)]
    state = replace(state, sampler=place_before_the_end(task, num_steps))
    trace: Trace = []
    for _ in range(num_steps):
        state = _reference_step(task, state, randoms)
        trace.append(copy_of(state.model.parameters, state.optimizer))
    return trace


def begin_late(state: OptimizerState, step: int) -> OptimizerState:
    """The state of an optimizer that believes to have taken so many steps."""
    return replace(state, shared=replace(state.shared, step=torch.full_like(state.shared.step, step)))


def _reference_step(task: Task, state: TrainingState, randoms: list[Tensor]) -> TrainingState:
    """One step; `randoms`, the random state of every rank, moves on."""
    indices, sampler = task.sampler.next_batch(state.sampler)
    batches = [
        task.splits.train.take(share(indices, rank, len(randoms)), state.sampler.epoch) for rank in range(len(randoms))
    ]
    total: dict[str, Tensor | None] = {}
    parameters, weights = state.model.parameters, weigh_shares(batches)
    with use_point(parameters, task.optimizer.prepare(parameters, state.optimizer)):
        for rank, batch in enumerate(batches):
            if len(batch):
                found, randoms[rank] = gradients_at(task, replace(state.model, random=randoms[rank]), batch)
                add_weighted(total, found, weights[rank])
    lr = task.optimizer.lr * task.schedule(state.samples)
    optimizer = Update(task.optimizer, parameters, state.optimizer, lr, task.clip_norm).apply(total)
    samples = state.samples + len(indices)
    return replace(state, optimizer=optimizer, sampler=sampler, step=state.step + 1, samples=samples)


def weigh_shares(batches: Sequence[Batch]) -> list[float]:
    """How much the mean of each share counts in that of the batch: by targets, or by samples if there are none."""
    targets = [batch.num_targets for batch in batches]
    counts = targets if any(targets) else [len(batch) for batch in batches]
    return [count / sum(counts) for count in counts]


def gradients_at(task: Task, model: State, batch: Batch) -> tuple[dict[str, Tensor | None], Tensor]:
    found: dict[str, Tensor | None] = {}
    _, after = gradients_of(task.executor, model, batch, task.accumulate, found.__setitem__)
    return found, after.random


def add_weighted(total: dict[str, Tensor | None], found: Mapping[str, Tensor | None], weight: float) -> None:
    for name, gradient in found.items():
        before = total.get(name)
        weighted = None if gradient is None else gradient * weight
        total[name] = weighted if before is None else before if weighted is None else before + weighted


def compare_traces(ranks: Sequence[Trace], reference: Trace, tolerance: float = 1e-5) -> Proof:
    """Replicas must be equal to the last bit; the reference is met to the last bit, or else to the tolerance."""
    num_steps = len(reference)
    expected_names = [step.keys() for step in reference]
    for rank, trace in enumerate(ranks):
        if [step.keys() for step in trace] != expected_names:
            finding = f"rank {rank} did not trace the steps and tensors of the reference"
            return Proof(False, False, num_steps, math.inf, tolerance, finding)
    for step in range(num_steps):
        for rank, trace in enumerate(ranks):
            name = _first_difference(trace[step], ranks[0][step])
            if name is not None:
                finding = f"replicas differ after step {step + 1}: {name} of rank {rank} is not that of rank 0"
                return Proof(False, False, num_steps, math.inf, tolerance, finding)
    held = ((f"after step {step + 1}, ", ranks[0][step], reference[step]) for step in range(num_steps))
    compared = compare_all(held, tolerance)
    if compared.off:
        return Proof(False, False, num_steps, compared.largest, tolerance, compared.off)
    finding = f"{len(ranks)} ranks gave the parameters of one rank after each of {num_steps} steps, {compared.how}"
    return Proof(True, compared.is_bitwise, num_steps, compared.largest, tolerance, finding)


@dataclass(frozen=True)
class Comparison:
    """Tensors that were found against those that were expected; `off` tells the first that is not within tolerance."""

    largest: float
    is_bitwise: bool
    off: str = ""

    @property
    def how(self) -> str:
        return "to the last bit" if self.is_bitwise else f"to {self.largest:.2g} of each tensor's largest value"


def compare_all(held: Iterable[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]], tolerance: float) -> Comparison:
    """Args:
    held: where, what was found and what was expected.
    """
    largest, is_bitwise = 0.0, True
    for where, found, expected in held:
        for name, tensor in expected.items():
            is_bitwise = is_bitwise and torch.equal(found[name], tensor)
            error, place = relative_error(found[name], tensor)
            largest = max(largest, error)
            if not error <= tolerance:
                return Comparison(largest, False, f"{where}{name}{place} is off by {error:.3g} of its largest value")
    return Comparison(largest, is_bitwise)


def _first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    return next((name for name, tensor in expected.items() if not torch.equal(found[name], tensor)), None)


def relative_error(found: Tensor, expected: Tensor) -> tuple[float, str]:
    """The largest difference over the largest value, and the index where it is."""
    if expected.numel() == 0:
        return 0.0, ""
    difference = (found.double() - expected.double()).abs()
    scale = max(float(expected.double().abs().max()), torch.finfo(torch.float32).tiny)
    position = int(difference.argmax())
    where = [int(i) for i in torch.unravel_index(torch.tensor(position), expected.shape)]
    return float(difference.flatten()[position]) / scale, str(where)


def place_before_the_end(task: Task, num_steps: int) -> SamplerState:
    """A place from which the steps take in the short last batch of an epoch and the first of the next."""
    first = max(0, task.sampler.num_batches - max(1, num_steps - 1))
    return SamplerState(0, first * task.sampler.batch_size)


def random_of(seed: int, rank: int) -> Tensor:
    return torch.Generator().manual_seed(derive_seed(seed, f"dropout/{rank}")).get_state()


def copy_of(parameters: Mapping[str, Tensor], optimizer: OptimizerState) -> dict[str, Tensor]:
    slots = {f"{name} ({slot})": tensor for name, own in optimizer.slots.items() for slot, tensor in own.items()}
    return {name: tensor.detach().clone() for name, tensor in {**parameters, **slots}.items()}
