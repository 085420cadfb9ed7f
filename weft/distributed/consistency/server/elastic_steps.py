"""Steps of elastic averaging, each rank at its own pace: EASGD, algorithm 1 of Zhang, Choromanska and LeCun (2015).

rank r   [step 0][step 1]...[step tau - 1] [step 0][step 1]...      every rank trains by its own optimizer; at the
         x ->                              x ->                     first step of each tau it sends its weights x to
            <- centre                         <- centre             the shards, which hold the centre; the answer
                                                                    comes while the gradient is computed

    shard    sends the centre as it finds it; centre <- centre + alpha (x - centre)
    rank     x <- x - alpha (x - centre), then its own update, with the gradient at x as it was

Work is dealt out tau shares at a time: each answer says which come after these.
"""

import math
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.elastic import elastic_force
from weft.distributed.consistency.parcel import write
from weft.distributed.consistency.server.link import ShardLink
from weft.distributed.consistency.server.protocol import PushHeader
from weft.distributed.consistency.server.session import Session
from weft.distributed.consistency.server.settings import Settings
from weft.graph import GradientSink
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic, Update

__all__ = ["ElasticSteps"]


@final
class ElasticSteps:
    """As GradientSteps. The session's places are this rank's copy of the centre, as its own visit left it."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._sent: dict[str, Tensor] = {}  # the weights with which it is at the shards
        self._block = 0  # of tau shares, which is taken now
        self._num_taken = 0  # of them
        self._gradients: dict[str, Tensor | None] = {}
        self._weight = 0.0
        self._set_out_at: float | None = None
        self.traffic = Traffic()

    def start(self) -> None:
        empty = self._session.mailbox.empty
        self._sent = {n: empty(tuple(p.shape), p.dtype) for n, p in self._session.parameters.items()}
        self._block, self._num_taken, self._set_out_at = self._session.step, 0, None

    @property
    def number(self) -> int:
        return self._block * self._settings.period + self._num_taken

    def begin(self, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self.traffic = Traffic()
        if self._num_taken == 0:
            self._visit()
        return self._gradients.__setitem__

    def _visit(self) -> None:
        """A copy sets out: the parameters may be moved, to look ahead, while it is under way."""
        write(self._sent, self._session.parameters)
        self._set_out_at = self._session.mailbox.clock.now()
        for link in self._session.links:
            link.begin()
            link.push(PushHeader(self._session.run, self._block, 0, lr=0.0, weight=1.0), link.cut(self._sent))

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        own = loss / self._weight if self._weight else 0.0
        if not math.isfinite(own):
            return own, update.state
        if self._set_out_at is not None:
            self._come_back(self._set_out_at)
            self._set_out_at = None
        self._num_taken += 1
        if self._num_taken == self._settings.period:
            self._block, self._num_taken = self._session.step, 0
        return own, update.apply(self._gradients)

    def _come_back(self, set_out_at: float) -> None:
        clock = self._session.mailbox.clock
        waited = clock.now()
        for link in self._session.links:
            answer = self._session.take_answer(link, self._block + 1)
            if answer is not None and answer.header.get("moved"):  # a shard that was restored has not seen x
                self._pull_together(link)
        num_bytes = sum(tensor.nbytes for tensor in self._sent.values())
        self.traffic = Traffic(clock.now() - waited, waited - set_out_at, num_bytes)

    @torch.no_grad()
    def _pull_together(self, link: ShardLink) -> None:
        """Move this rank's weights, and its copy of the centre as the shard moves the centre."""
        for piece, centre in zip(link.pieces, link.places, strict=True):
            sent = piece.of(self._sent[piece.name]).to(centre.device)
            force = elastic_force(sent, centre, self._settings.alpha)
            piece.of(self._session.parameters[piece.name]).sub_(force)
            centre.add_(force)
