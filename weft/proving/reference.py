"""Steps of a training computed in one process, without any of the code that proofs judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.graph import State
from weft.graph.executors.random_state import fold_random_state, seed_random_state
from weft.proving.proof import clone
from weft.specs import Batch
from weft.training.build import derive_seed
from weft.training.gradients import gradients_of, use_point
from weft.training.loop import Task, TrainingState
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Update
from weft.training.sampling import SamplerState, share, span_by_speed

__all__ = [
    "Replica",
    "add_weighted",
    "begin_late",
    "gradients_at",
    "place_before_the_end",
    "replicas_of",
    "share_of",
    "spoil",
    "update_of",
    "weigh_shares",
]


@dataclass
class Replica:
    """One rank of a reference."""

    weights: dict[str, Tensor]
    optimizer: OptimizerState
    random: Tensor
    loss: float = 0.0  # of the last share


def replicas_of(state: TrainingState, seed: int, num_ranks: int) -> list[Replica]:
    """All ranks as a training begins."""

    device = state.model.device

    def own_state() -> OptimizerState:
        return replace(state.optimizer, slots={name: clone(slots) for name, slots in state.optimizer.slots.items()})

    randoms = [random_of(seed, rank, device) for rank in range(num_ranks)]
    return [Replica(clone(state.model.parameters), own_state(), random) for random in randoms]


def share_of(task: Task, place: SamplerState, part: int, num_parts: int, speeds: Sequence[int] | None = None) -> Batch:
    """One share of the global batch at a place; where speeds are given, dealt by these."""
    indices, _ = task.sampler.next_batch(place)
    own = indices[span_by_speed(len(indices), part, speeds)] if speeds else share(indices, part, num_parts)
    return task.splits.train.take(own, place.epoch)


def gradients_at(
    task: Task, model: State, replica: Replica, batch: Batch, num_micro: int | None = None
) -> dict[str, Tensor | None]:
    """Of a replica's own weights on its share, where its optimizer wants them; none where it has no samples. Its random
    state moves on.

    Args:
        num_micro: the micro-batches of a pipeline, each of which draws from generators of its own; None without one.
    """
    found: dict[str, Tensor | None] = {}
    replica.loss = 0.0
    if len(batch):
        with use_point(replica.weights, task.optimizer.prepare(replica.weights, replica.optimizer)):
            at = replace(model, parameters=replica.weights, random=replica.random)
            if num_micro is None:
                replica.loss, after = gradients_of(task.executor, at, batch, task.accumulate, found.__setitem__)
            else:
                replica.loss, after = _add_micro_batches(task, at, batch, num_micro, found)
        replica.random = after.random
    return found


def _add_micro_batches(
    task: Task, state: State, batch: Batch, num_micro: int, found: dict[str, Tensor | None]
) -> tuple[float, State]:
    """One micro-batch after the other, weighed by its targets; every pass of an accumulation has as many."""
    pieces, loss = batch.split(task.accumulate), 0.0
    for piece, weight in zip(pieces, weigh_shares(pieces), strict=True):
        random = state.random
        micros = piece.split(num_micro)
        for i, (micro, part) in enumerate(zip(micros, weigh_shares(micros), strict=True)):
            own: dict[str, Tensor | None] = {}
            at = replace(state, random=fold_random_state(random, i, state.device))
            outputs, state = task.executor(at, micro, own.__setitem__)
            add_weighted(found, own, weight * part)
            loss += weight * part * outputs.loss.item()
        state = replace(state, random=fold_random_state(random, -1, state.device))
    return loss, state


def update_of(task: Task, replica: Replica, samples: int) -> Update:
    """The update of a replica's own optimizer after so many samples."""
    lr = task.optimizer.lr * task.schedule(samples)
    return Update(task.optimizer, replica.weights, replica.optimizer, lr, task.clip_norm)


def add_weighted(total: dict[str, Tensor | None], found: Mapping[str, Tensor | None], weight: float) -> None:
    for name, gradient in found.items():
        before = total.get(name)
        weighted = None if gradient is None else gradient * weight
        total[name] = weighted if before is None else before if weighted is None else before + weighted


def weigh_shares(batches: Sequence[Batch]) -> list[float]:
    """How much the mean of each share counts in that of the batch: by targets, or by samples if there are none."""
    targets = [batch.num_targets for batch in batches]
    counts = targets if any(targets) else [len(batch) for batch in batches]
    return [count / sum(counts) for count in counts]


def begin_late(state: OptimizerState, step: int) -> OptimizerState:
    """The state of an optimizer that believes to have taken so many steps."""
    return replace(state, shared=replace(state.shared, step=torch.full_like(state.shared.step, step)))


def place_before_the_end(task: Task, num_steps: int) -> SamplerState:
    """A place from which the steps take in the short last batch of an epoch and the first of the next."""
    first = max(0, task.sampler.num_batches - max(1, num_steps - 1))
    return SamplerState(0, first * task.sampler.batch_size)


def random_of(seed: int, rank: int, device: torch.device) -> Tensor:
    return seed_random_state(derive_seed(seed, f"dropout/{rank}"), device)


def spoil(state: TrainingState, replicas: AbstractReplicas) -> None:
    """Give every rank but the first of those that hold the same part of a parameter other weights: joining must mend
    that."""
    with torch.no_grad():
        for name, parameter in state.model.parameters.items():
            parameter.add_(replicas.mesh.number(replicas.placement.copied_over(name)))
