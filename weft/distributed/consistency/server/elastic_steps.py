"""Steps of elastic averaging, each rank at its own pace: EASGD, algorithm 1 of Zhang, Choromanska and LeCun (2015).

rank r   [step 0][step 1]...[step tau - 1] [step 0][step 1]...      every rank trains by its own optimizer; at the
         x ->                              x ->                     first step of each tau it sends its weights x to
            <- centre                         <- centre             the shards, which hold the centre; the answer
                                                                    comes while the gradient is computed

    shard    sends the centre as it finds it; centre <- centre + alpha (x - centre)
    rank     x <- x - alpha (x - centre), then its own update, with the gradient at x as it was

With a codec the force is that of what was sent, q(x) and q(centre), on both ends.

Work is dealt out tau shares at a time: each answer says which come after these.
"""

from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import write
from weft.distributed.consistency.elastic import draw_centre, is_turn
from weft.distributed.consistency.own_steps import OwnSteps
from weft.distributed.consistency.scheme import AbstractScheme
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
    """As GradientSteps."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._visits = _Visits(session, settings)
        self._own = OwnSteps(self._visits)

    def start(self) -> None:
        self._visits.start()

    @property
    def number(self) -> int:
        return self._visits.number

    def begin(self, weight: float) -> GradientSink:
        return self._own.begin(self.number, weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        return self._own.finish(loss, update)

    @property
    def traffic(self) -> Traffic:
        return self._visits.traffic()


@final
class _Visits(AbstractScheme):
    """The session's places are this rank's copy of the centre, as its own visit left it."""

    def __init__(self, session: Session, settings: Settings) -> None:
        self._session = session
        self._period, self._alpha = settings.period, settings.alpha
        self.number = 0  # of the share that is taken now
        self._sent: dict[str, Tensor] = {}  # the weights with which it is at the shards
        self._set_out_at: float | None = None
        self._num_bytes = 0
        self._traffic = Traffic()

    def start(self) -> None:
        empty = self._session.mailbox.empty
        self._sent = {n: empty(tuple(p.shape), p.dtype) for n, p in self._session.parameters.items()}
        self.number, self._set_out_at = self._session.step * self._period, None

    def begin(self, step: int, weight: float) -> None:
        """A copy sets out: the parameters may be moved, to look ahead, while it is under way."""
        self._traffic = Traffic()
        if not is_turn(0, step, self._period):
            return
        write(self._sent, self._session.parameters)
        self._set_out_at, self._num_bytes = self._session.mailbox.clock.now(), 0
        for link in self._session.links:
            link.begin()
            header = PushHeader(self._session.run, step // self._period, 0, lr=0.0, weight=1.0)
            pieces = link.cut(self._sent)
            encoded = link.encode(pieces)
            link.decode(encoded, pieces)  # the force is of what the shard sees
            self._num_bytes += link.push_encoded(header, encoded)

    def advance(self) -> None:
        """The mailbox moves on by itself."""

    def before_update(self) -> None:
        if self._set_out_at is None:
            return
        clock = self._session.mailbox.clock
        waited, set_out_at, self._set_out_at = clock.now(), self._set_out_at, None
        for link in self._session.links:
            answer = self._session.take_answer(link, self.number // self._period + 1)
            if answer is not None and answer.header.get("moved"):  # a shard that was restored has not seen x
                self._meet(link)
        self._session.agree()
        self._traffic = Traffic(clock.now() - waited, waited - set_out_at, self._num_bytes)

    @torch.no_grad()
    def _meet(self, link: ShardLink) -> None:
        """Move this rank's weights, and its copy of the centre as the shard moves the centre."""
        for piece, centre in zip(link.pieces, link.places, strict=True):
            sent = piece.of(self._sent[piece.name]).to(centre.device)
            force = draw_centre(centre, sent, self._alpha)
            piece.of(self._session.parameters[piece.name]).sub_(force)

    def after_update(self, state: OptimizerState) -> OptimizerState:
        self.number += 1
        if self.number % self._period == 0:
            self.number = self._session.step * self._period
        return state

    def traffic(self) -> Traffic:
        return self._traffic
