"""Proof that ranks gossip as they should: what they recorded, done again in one process by the papers' equations.

    ranks       rank 0: x_0, rank 1: x_1, ...      workers, desks and messages; each records what happened to it
    reference   X = [x_0, x_1, ...]                one list in one process, in an order that all records allow

    pair (a, p)    x_a, x_p  <-  (x_a + x_p) / 2                          (Lian et al., 2018, algorithm 1)
    step r         x_r  <-  x_r - lr g_r(x before the pairs of this turn)
    mix r, of H    x_r  <-  mean of x_r and all x_j, j in H, as their turn began; then its step      (Lian et al., 2017)

The reference knows events, and nothing of slots, desks or scripts. The audit knows only events too.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from weft.distributed.consistency.equations import Replica, clone
from weft.distributed.consistency.pairs.events import NOBODY, Deal, Event, Look, Mean, Mix, Pair, Step
from weft.distributed.proof import Proof, Trace, compare_all, copy_of, gradients_at, random_of
from weft.errors import CorruptFileError
from weft.planning.gossip_graphs import Split
from weft.training.build import build_task
from weft.training.datasets import Splits
from weft.training.gradients import use_point
from weft.training.loop import Task, TrainingState
from weft.training.optimizers import OptimizerState
from weft.training.recipe import Recipe
from weft.training.replicas import Update
from weft.training.sampling import share

__all__ = ["audit_pairs", "compare_pairs", "trace_pairs"]


def audit_pairs(journals: Sequence[Sequence[Event]], split: Split) -> list[str]:
    """The faults in what all ranks recorded, in words; none is a pass."""
    return list(_audit(journals, split))


def _audit(journals: Sequence[Sequence[Event]], split: Split) -> Iterator[str]:
    answered = {(e.rank, e.turn, rank) for rank, events in enumerate(journals) for e in events if isinstance(e, Pair)}
    taken = Counter(event.work for events in journals for event in events if isinstance(event, Deal) and not event.stop)
    yield from (f"piece {work} of the work was given out {times} times" for work, times in taken.items() if times > 1)
    for rank, events in enumerate(journals):
        turns = [event.turn for event in events if isinstance(event, Step | Mix)]
        if turns != list(range(len(turns))):
            yield f"rank {rank} did not take its turns one after the other"
        came = [(event.rank, event.turn) for event in events if isinstance(event, Pair)]
        if split.asks[rank] and came:
            yield f"rank {rank} was asked, and asks itself"
        if len(set(came)) < len(came):
            yield f"rank {rank} was asked twice in one turn of another"
        for event in events:
            if (
                isinstance(event, Step)
                and event.partner != NOBODY
                and (rank, event.turn, event.partner) not in answered
            ):
                pair = f"rank {rank} has the mean with rank {event.partner} in turn {event.turn}"
                yield f"{pair}, which knows nothing of it"


def trace_pairs(
    recipe: Recipe, splits: Splits, seed: int, journals: Sequence[Sequence[Event]]
) -> tuple[list[Trace], dict[int, dict[str, Tensor]]]:
    """The weights and slots of every rank after each of its steps, and the mean of each evaluation."""
    task, state = build_task(recipe, splits, seed)
    reference = _Reference(task, state, seed, journals)
    while reference.move_on():
        pass
    left = [(rank, events[0]) for rank, events in enumerate(reference.left) if events]
    if left:
        rank, event = left[0]
        raise CorruptFileError(f"records of the ranks do not fit together (rank: {rank}, {event}); replay another run")
    return reference.traces, reference.means


class _Reference:
    """All replicas at once."""

    def __init__(self, task: Task, state: TrainingState, seed: int, journals: Sequence[Sequence[Event]]) -> None:
        self.task = task
        self.model = state.model
        self.size = len(journals)
        self.left = [list(events) for events in journals]
        self.replicas = [
            Replica(clone(state.model.parameters), _clone_state(state.optimizer), random_of(seed, rank))
            for rank in range(self.size)
        ]
        # By rank and turn, the weights that the turn began with: where its gradient is taken, and what it asks with.
        self.began = {(rank, 0): clone(state.model.parameters) for rank in range(self.size)}
        self.work = [0] * self.size
        self.answers: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self.looks: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.traces: list[Trace] = [[] for _ in journals]
        self.means: dict[int, dict[str, Tensor]] = {}

    def move_on(self) -> bool:
        """Do what can be done next on every rank; whether there was anything."""
        moved = False
        for rank, events in enumerate(self.left):
            while events and self._do(rank, events[0]):
                events.pop(0)
                moved = True
        return moved

    def _do(self, rank: int, event: Event) -> bool:
        """False where it needs what has not happened yet."""
        weights = self.replicas[rank].weights
        match event:
            case Deal(work):
                self.work[rank] = work
            case Pair(other, turn):
                theirs = self.began.get((other, turn))
                if theirs is None:
                    return False
                mean = {name: (tensor + theirs[name]) / 2 for name, tensor in weights.items()}
                weights.update(mean)
                self.answers[other, turn, rank] = clone(mean)
            case Step(turn, partner):
                if partner != NOBODY and (rank, turn, partner) not in self.answers:
                    return False
                weights.update({} if partner == NOBODY else self.answers[rank, turn, partner])
                self._step(rank, turn)
            case Mix(turn, ranks):
                if any((other, turn) not in self.began for other in ranks):
                    return False
                alike = 1 / (1 + len(ranks))
                for name, tensor in weights.items():
                    others = sum(alike * self.began[other, turn][name] for other in ranks)
                    weights[name] = alike * tensor + others
                self._step(rank, turn)
            case Look(number):
                self.looks[rank, number] = clone(weights)
            case Mean(number, ranks):
                if any((other, number) not in self.looks for other in ranks):
                    return False
                copies = [self.looks[other, number] for other in ranks]
                self.means[number] = {
                    name: sum((copy[name] for copy in copies[1:]), first) / len(copies)
                    for name, first in copies[0].items()
                }
        return True

    def _step(self, rank: int, turn: int) -> None:
        """The gradient of the weights that the turn began with, on the weights as the pairs have made them."""
        task, replica = self.task, self.replicas[rank]
        batch_number, part = divmod(self.work[rank], self.size)
        sampler = task.sampler.state_at(batch_number)
        indices, _ = task.sampler.next_batch(sampler)
        batch = task.splits.train.take(share(indices, part, self.size), sampler.epoch)
        found: dict[str, Tensor | None] = {}
        point = self.began[rank, turn]
        if len(batch):
            with use_point(point, task.optimizer.prepare(point, replica.optimizer)):
                model = replace(self.model, parameters=point, random=replica.random)
                found, replica.random = gradients_at(task, model, batch)
        lr = task.optimizer.lr * task.schedule(task.sampler.samples_before(sampler))
        update = Update(task.optimizer, replica.weights, replica.optimizer, lr, task.clip_norm)
        replica.optimizer = update.apply(found)
        self.began[rank, turn + 1] = clone(replica.weights)
        self.traces[rank].append(copy_of(replica.weights, replica.optimizer))


def compare_pairs(
    ranks: Sequence[Trace],
    references: Sequence[Trace],
    means: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    tolerance: float = 1e-5,
) -> Proof:
    """Every rank after each of its steps, and the mean that was judged at the end, against the reference."""
    num_steps = sum(map(len, references))
    for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True)):
        if [step.keys() for step in trace] != [step.keys() for step in reference]:
            finding = f"rank {rank} did not trace the steps and tensors that it recorded"
            return Proof(False, False, num_steps, math.inf, tolerance, finding)
    held = [
        (f"after step {turn + 1} of rank {rank}, ", found, expected)
        for rank, (trace, reference) in enumerate(zip(ranks, references, strict=True))
        for turn, (found, expected) in enumerate(zip(trace, reference, strict=True))
    ]
    compared = compare_all([*held, ("in the mean of all ranks, ", *means)], tolerance)
    if compared.off:
        return Proof(False, False, num_steps, compared.largest, tolerance, compared.off)
    finding = f"{len(ranks)} ranks averaged by the equations for {num_steps} steps in all, {compared.how}"
    return Proof(True, compared.is_bitwise, num_steps, compared.largest, tolerance, finding)


def _clone_state(state: OptimizerState) -> OptimizerState:
    return replace(state, slots={name: clone(slots) for name, slots in state.slots.items()})
