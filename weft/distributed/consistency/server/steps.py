"""Steps that push gradients, or what the rank's own optimizer made of them, and take up the weights that come back.

backward   [layer 3][layer 2][layer 1]
shard 1             =====>                  a shard's gradients set out as soon as its last one is there
shard 0                       =====>
answer                             <====    new weights of every shard, and which step to take next
"""

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor

from weft.distributed.consistency.server.protocol import PushHeader
from weft.distributed.consistency.server.session import Session
from weft.distributed.consistency.server.settings import Settings
from weft.graph import GradientSink
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["GradientSteps", "PendingGradients"]


@final
class PendingGradients:
    """Gradients for a shard that is not reached in every step, added up until its turn, each times its share of its
    batch.

    What is pushed is the sum over the mean share, with the mean share: so every gradient counts with its own share, and
    as many as were added.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._totals: list[Tensor | None] = []

    def add(self, share: float, tensors: Sequence[Tensor | None]) -> None:
        terms = [None if tensor is None else tensor * share for tensor in tensors]  # the next step may reuse the memory
        before = self._totals or [None] * len(terms)
        self._totals = [t if b is None else b if t is None else b + t for b, t in zip(before, terms, strict=True)]
        self._shares.append(share)

    def take(self) -> tuple[float, list[Tensor | None]]:
        """The share to push with, and the tensors; nothing is pending any more.

        >>> import torch
        >>> pending = PendingGradients()
        >>> pending.add(0.75, [torch.tensor([1.0]), None])
        >>> pending.add(0.25, [torch.tensor([3.0]), None])
        >>> pending.take()
        (0.5, [tensor([3.]), None])
        """
        mean = sum(self._shares) / len(self._shares)
        totals, self._shares, self._totals = self._totals, [], []
        return mean, [None if total is None or not mean else total / mean for total in totals]


@final
class GradientSteps:
    """The servers update; with `push=difference` every rank does, and the servers add what it changed.

    `start` once all shards have let this rank go, then for each step `begin` and `finish`, as in AbstractReplicas.
    """

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._turn = 0  # steps that this rank has taken
        self._gradients: dict[str, Tensor | None] = {}
        self._pending: list[PendingGradients] = []  # by shard
        self._weight = 0.0
        self._set_out_at: float | None = None  # when the first gradients of this step did
        self._early_bytes = 0
        self.traffic = Traffic()

    def start(self) -> None:
        self._pending = [PendingGradients() for _ in self._session.carriers]
        self._turn = 0

    @property
    def number(self) -> int:
        return self._session.step

    def begin(self, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self._set_out_at, self._early_bytes = None, 0
        for link in self._session.carriers:
            link.begin()
        return self._add

    def _add(self, name: str, gradient: Tensor | None) -> None:
        """Send what a shard waits for as soon as it is all there; the last shard's goes with the rest, at the end."""
        self._gradients[name] = gradient
        links = self._session.carriers
        for link in links:
            is_completed = link.is_completed_by(name)
            if is_completed and self._settings.is_sent_early and not all(one.is_complete for one in links):
                self._set_out_at = self._set_out_at or self._now
                self._early_bytes += link.send_part(self._session.run, self.number, link.cut(self._gradients))

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        own, state = loss / self._weight if self._weight else 0.0, update.state
        if not self._settings.is_synchronous and not math.isfinite(own):
            return own, state
        if self._settings.form == "difference":
            state = self._take_own_step(update)
        elif self._settings.clips_own and self._settings.clip_norm is not None:
            self._gradients = dict(clip_by_norm(self._in_order(update), self._settings.clip_norm, update.norm))
        waited = self._now
        num_bytes = self._exchange(update, loss.hex() if self._settings.is_synchronous else None)
        hidden = waited - self._set_out_at if self._set_out_at is not None else 0.0
        self.traffic = Traffic(self._now - waited, hidden, num_bytes + self._early_bytes)
        total = self._session.links[0].loss
        return own if total is None else total, state

    @property
    def _now(self) -> float:
        return self._session.mailbox.clock.now()

    def _exchange(self, update: Update, loss: str | None) -> int:
        """Push to every shard whose turn it is, take its weights; how many bytes were sent."""
        links, run, step, num_bytes = self._session.carriers, self._session.run, self.number, 0
        due = [self._settings.is_due(shard, self._turn) for shard in range(len(links))]
        for shard, link in enumerate(links):
            weight, tensors = self._weight, link.cut(self._gradients)
            if self._settings.parts > 1:
                self._pending[shard].add(weight, tensors)
                tensors = [None] * len(tensors)
                if due[shard]:
                    weight, tensors = self._pending[shard].take()
            if due[shard] or shard == 0:  # which gives out the work, in every step
                header = PushHeader(
                    run, step, 0, update.lr, weight, wants=due[shard], loss=loss, settings=update.settings
                )
                num_bytes += link.push(header, tensors)
        for shard, link in enumerate(links):
            if due[shard] or shard == 0:
                self._session.take_answer(link, step + 1)
        self._turn += 1
        self._session.agree()
        self._catch_up()
        return num_bytes

    def _catch_up(self) -> None:
        """Shards close rounds each by itself: weights of a shard that is behind shard 0 are asked for again."""
        behind = [link for link in self._session.links if link.step < self.number]
        if behind and not self._settings.deals_work and not self._session.is_stopped:
            self._session.greet(behind, self.number)

    def _take_own_step(self, update: Update) -> OptimizerState:
        """This rank's own optimizer makes the update; what is pushed is by how much it changed the weights."""
        parameters = self._session.parameters
        before = {name: parameter.clone() for name, parameter in parameters.items()}
        state = update.apply(self._gradients)
        self._gradients = {n: p - before[n] for n, p in parameters.items() if self._gradients.get(n) is not None}
        return state

    def _in_order(self, update: Update) -> dict[str, Tensor | None]:
        return {name: self._gradients.get(name) for name in update.parameters}
