"""The equations of elastic averaging, followed in one process in the order that the shards recorded.

    shard 0   r1 r0 r0 r1 ...      visits, each of a rank with the weights that it had before the first step of its
    shard 1   r0 r1 r0 r1 ...      next tau; a rank that has been at all shards takes these steps

With a codec a rank is welcomed with q(centre), and the force is alpha (q(x) - q(centre)).

No servers, messages or settings: only the plan, the records and the recipe.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.server.decisions import Commit, Decision, Push, Release
from weft.graph import State
from weft.proving.held import elements_of_servers
from weft.proving.method import Case
from weft.proving.proof import clone
from weft.proving.reference import Replica, gradients_at, replicas_of, share_of, update_of
from weft.proving.rounding import rounding_of
from weft.training.build import build_task
from weft.training.loop import Task

__all__ = ["follow_centre"]


@dataclass
class _Rank:
    """A replica, and the visit that it is on."""

    replica: Replica
    visitor: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the visitor
    shards: set[int] = field(default_factory=set)  # that it has been to
    welcomes: set[int] = field(default_factory=set)  # shards that have sent it the centre to begin with


def follow_centre(case: Case, records: Sequence[Sequence[Decision]]) -> dict[str, Tensor]:
    """The centre at the end of a training, with the visits that each shard recorded."""
    task, state = build_task(case.recipe, case.splits, case.seed, dtype=case.dtype)
    follower = _Follower(task, state.model, case)
    follower.ranks = [_Rank(replica) for replica in replicas_of(state, case.seed, case.plan.num_replicas)]
    left = [_events(decisions)[::-1] for decisions in records]
    while any(left):
        shard = next((shard for shard, events in enumerate(left) if events and follower.can(shard, events[-1])), None)
        assert shard is not None, "records of one training have an order that all allow"
        follower.do(shard, left[shard].pop())
    return follower.centre


def _events(decisions: Sequence[Decision]) -> list[Push | int]:
    """Of each rank the welcome, which is its first release, and its visits."""
    events: list[Push | int] = []
    for decision in decisions:
        if isinstance(decision, Commit):
            events.append(decision.pushes[0])
        elif isinstance(decision, Release) and decision.rank not in events:
            events.append(decision.rank)
    return events


@final
class _Follower:
    def __init__(self, task: Task, model: State, case: Case) -> None:
        plan = case.plan
        self._task = task
        self._model = model
        self._size = plan.num_replicas
        self._num_micro = plan.num_micro_batches if plan.pipeline > 1 else None
        self._period = int(plan.consistency["steps"])
        self._alpha = float(plan.consistency["beta"]) / plan.num_replicas
        self._round = rounding_of(plan)
        self.ranks: list[_Rank] = []
        self.centre = clone(model.parameters)
        trained = {name: p.detach() for name, p in model.parameters.items() if p.requires_grad}
        self._cuts = elements_of_servers(trained, plan.num_shards, may_cut=True, layouts=case.layouts)

    def can(self, shard: int, event: Push | int) -> bool:
        """A visit comes after all welcomes, and at each shard once before the steps that follow."""
        if isinstance(event, int):
            return True
        rank = self.ranks[event[0]]
        return len(rank.welcomes) == len(self._cuts) and shard not in rank.shards

    def do(self, shard: int, event: Push | int) -> None:
        if isinstance(event, int):
            self._welcome(shard, self.ranks[event])
        else:
            self._visit(shard, event)

    @torch.no_grad()
    def _welcome(self, shard: int, rank: _Rank) -> None:
        """A rank begins at the centre, which others may have moved by then."""
        rank.welcomes.add(shard)
        for piece in self._cuts[shard]:
            piece.put(rank.replica.weights[piece.name], self._round(piece.take(self.centre[piece.name])))

    def _visit(self, shard: int, push: Push) -> None:
        rank, stint = self.ranks[push[0]], push[1]
        first = stint * self._period
        if not rank.shards:
            rank.visitor = clone(rank.replica.weights)
            rank.gradients = self._gradients(rank.replica, first)
        with torch.no_grad():
            for piece in self._cuts[shard]:
                centre, visitor = piece.take(self.centre[piece.name]), piece.take(rank.visitor[piece.name])
                force = (self._round(visitor) - self._round(centre)) * self._alpha
                piece.put(self.centre[piece.name], centre + force)
                own = rank.replica.weights[piece.name]
                piece.put(own, piece.take(own) - force)
        rank.shards.add(shard)
        if len(rank.shards) == len(self._cuts):
            rank.shards.clear()
            self._update(rank.replica, first, rank.gradients)
            for number in range(first + 1, first + self._period):
                self._update(rank.replica, number, self._gradients(rank.replica, number))

    def _gradients(self, replica: Replica, number: int) -> dict[str, Tensor | None]:
        place = self._task.sampler.state_at(number // self._size)
        batch = share_of(self._task, place, number % self._size, self._size)
        return gradients_at(self._task, self._model, replica, batch, self._num_micro)

    def _update(self, replica: Replica, number: int, gradients: dict[str, Tensor | None]) -> None:
        """Steps beyond the end, which a rank does not take, are followed by no visit: the centre hears of none."""
        sampler = self._task.sampler
        samples = sampler.samples_before(sampler.state_at(number // self._size))
        replica.optimizer = update_of(self._task, replica, samples).apply(gradients)
