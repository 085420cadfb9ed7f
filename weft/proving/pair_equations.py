"""Proof that ranks gossip as they should: what they recorded, done again in one process by the papers' equations.

    ranks       rank 0: x_0, rank 1: x_1, ...      workers, responders and messages; each records what happened to it
    reference   X = [x_0, x_1, ...]                one list in one process, in an order that all records allow

    pair (a, p)    x_a, x_p  <-  (x_a + x_p) / 2                          (Lian et al., 2018, algorithm 1)
    step r         x_r  <-  x_r - lr g_r(x before the pairs of this turn)
    mix r, of H    x_r  <-  mean of x_r and all x_j, j in H, as their turn began; then its step      (Lian et al., 2017)

With a codec q, a pair leaves x_a + (q(x_p) - q(x_a)) / 2 and x_p + (q(x_a) - q(x_p)) / 2, and a mix
x_r + sum_j (q(x_j) - q(x_r)) / (1 + |H|).

The reference knows events, and nothing of how ranks reach each other.
"""

from collections.abc import Sequence

from torch import Tensor

from weft.distributed.consistency.pairs.events import NOBODY, Deal, Event, Look, Mean, Mix, Pair, Step
from weft.errors import CorruptFileError
from weft.proving.method import Case
from weft.proving.proof import Trace, clone, copy_of
from weft.proving.reference import Replica, gradients_at, replicas_of, share_of, update_of
from weft.proving.relaxed_equations import Weights
from weft.proving.rounding import Rounding, rounding_of
from weft.training.build import build_task
from weft.training.loop import Task, TrainingState

__all__ = ["trace_pairs"]


def trace_pairs(case: Case, journals: Sequence[Sequence[Event]]) -> tuple[list[Trace], dict[int, dict[str, Tensor]]]:
    """The weights and slots of every rank after each of its steps, and the mean of each evaluation."""
    task, state = build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
    reference = _Reference(task, state, case.seed, journals, rounding_of(case.plan))
    while reference.move_on():
        pass
    left = [(rank, events[0]) for rank, events in enumerate(reference.left) if events]
    if left:
        rank, event = left[0]
        raise CorruptFileError(f"records of the ranks do not fit together (rank: {rank}, {event}); replay another run")
    return reference.traces, reference.means


class _Reference:
    """All replicas at once."""

    def __init__(
        self,
        task: Task,
        state: TrainingState,
        seed: int,
        journals: Sequence[Sequence[Event]],
        rounding: Rounding,
    ) -> None:
        self.task = task
        self.round = rounding
        self.model = state.model
        self.size = len(journals)
        self.left = [list(events) for events in journals]
        self.replicas = replicas_of(state, seed, self.size)
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
                mine, answer = self._pair(weights, theirs)
                weights.update(mine)
                self.answers[other, turn, rank] = answer
            case Step(turn, partner):
                if partner != NOBODY and (rank, turn, partner) not in self.answers:
                    return False
                weights.update({} if partner == NOBODY else self.answers[rank, turn, partner])
                self._step(rank, turn)
            case Mix(turn, ranks):
                if any((other, turn) not in self.began for other in ranks):
                    return False
                weights.update(self._mix(weights, [self.began[other, turn] for other in ranks]))
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

    def _pair(self, mine: Weights, theirs: Weights) -> tuple[Weights, Weights]:
        """Both ends after a pair."""
        if self.round.is_exact:
            mean = {name: (tensor + theirs[name]) / 2 for name, tensor in mine.items()}
            return mean, clone(mean)
        apart = {name: self.round(theirs[name]) - self.round(tensor) for name, tensor in mine.items()}
        moved = {name: tensor.detach() + apart[name] / 2 for name, tensor in mine.items()}
        return moved, {name: tensor.detach() - apart[name] / 2 for name, tensor in theirs.items()}

    def _mix(self, mine: Weights, others: Sequence[Weights]) -> Weights:
        alike = 1 / (1 + len(others))
        if self.round.is_exact:
            return {n: alike * tensor + sum(alike * other[n] for other in others) for n, tensor in mine.items()}
        mixed = clone(mine)
        for name, tensor in mine.items():
            for other in others:
                mixed[name] = mixed[name] + (self.round(other[name]) - self.round(tensor)) * alike
        return mixed

    def _step(self, rank: int, turn: int) -> None:
        """The gradient of the weights that the turn began with, on the weights as the pairs have made them."""
        task, replica = self.task, self.replicas[rank]
        batch, part = divmod(self.work[rank], self.size)
        place = task.sampler.state_at(batch)
        before = Replica(self.began[rank, turn], replica.optimizer, replica.random)
        found = gradients_at(task, self.model, before, share_of(task, place, part, self.size))
        replica.random = before.random
        replica.optimizer = update_of(task, replica, task.sampler.samples_before(place)).apply(found)
        self.began[rank, turn + 1] = clone(replica.weights)
        self.traces[rank].append(copy_of(replica.weights, replica.optimizer))
