"""The turns of one training of a rank that gossips over the mailbox: its work, its averages, and what it shares.

worker      | gradient ............... | step |  gradient ............... | step |  averages around its gradient
responder   answers for it meanwhile, and never waits                               (averaging.py, responder.py)
"""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from weft.distributed.codecs import PackedTensors, write
from weft.distributed.consistency.pairs.averaging import AbstractAveraging
from weft.distributed.consistency.pairs.events import Deal, Mix, ReplayPlan, Step
from weft.distributed.consistency.pairs.protocol import RunMailbox, Tag
from weft.distributed.consistency.pairs.weights import SharedWeights
from weft.distributed.consistency.scheme import AbstractScheme
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic

__all__ = ["GossipTurns", "WorkFeed"]


@final
class WorkFeed:
    """This rank's work: asked of the responder of rank 0 a turn ahead; in a replay what was dealt then, up to where the
    rank died. Piece i is share i mod N of batch i div N."""

    def __init__(self, mailbox: RunMailbox, shared: SharedWeights, replay: ReplayPlan | None) -> None:
        self._mailbox = mailbox
        self._shared = shared
        self._replayed = None if replay is None else iter(replay.deals)
        self.piece = 0
        self.is_stopped = False
        self.ask(0)
        self.take(0)

    def ask(self, turn: int) -> None:
        if self._replayed is None:
            self._mailbox.note(0, Tag.DEAL, turn=turn)

    def take(self, turn: int) -> None:
        """Take the work that was asked for a turn ago."""
        if self._replayed is not None:
            deal = next(self._replayed, None) or Deal(self.piece, stop=True)
        else:
            header = self._mailbox.receive_answer(Tag.WORK, 0, turn=turn).header
            deal = Deal(int(header["work"]), bool(header["stop"]))
        self._shared.note(deal)
        self.piece, self.is_stopped = deal.work, deal.stop


@final
class GossipTurns(AbstractScheme):
    """Args:
    shared: this rank's weights, shared with its responder.
    parameters: the model's, which the rank computes on and updates.
    """

    def __init__(
        self,
        mailbox: RunMailbox,
        shared: SharedWeights,
        averaging: AbstractAveraging,
        parameters: Mapping[str, Tensor],
        replay: ReplayPlan | None,
    ) -> None:
        self._mailbox = mailbox
        self._shared = shared
        self._averaging = averaging
        self._parameters = parameters
        self.replay = replay
        self.work = WorkFeed(mailbox, shared, replay)
        self.turn = 0
        self.num_looks = 0  # evaluations
        self._event: Step | Mix = Step(0)  # of this turn
        self._num_bytes = 0
        self._began = self._waited = self._arrived = 0.0
        self._traffic = Traffic()

    def begin(self, step: int, weight: float) -> None:
        self._began = self._now
        self._num_bytes = self._averaging.set_out(step)
        self.work.ask(step + 1)

    def advance(self) -> None:
        """The mailbox moves on by itself."""

    def before_update(self) -> None:
        """Take the average, and keep the responder from the weights until they are updated."""
        self._waited = self._now
        found, self._event = self._averaging.take(self.turn)
        self._mailbox.settle()
        while not self._shared.begin_step(self._event):
            self._mailbox.receive_answer(Tag.GO, self._shared.rank)
        self._arrived = self._now
        write(self._parameters, self.weights.tensors if found is None else self.weights.views_of(found))

    def after_update(self, state: OptimizerState) -> OptimizerState:
        if self._shared.end_step(self._parameters, self._event):
            self._mailbox.note(self._shared.rank, Tag.FREE)
        updated = self._now
        self.turn += 1
        self.work.take(self.turn)
        hidden = self._waited - self._began if self._num_bytes else 0.0
        num_bytes = self._num_bytes + self._shared.take_answered_bytes()
        self._traffic = Traffic(self._arrived - self._waited + self._now - updated, hidden, num_bytes)
        return state

    def traffic(self) -> Traffic:
        return self._traffic

    def leave(self) -> None:
        """This turn and those after it are not taken any more."""
        self._averaging.leave(self.turn)

    @property
    def weights(self) -> PackedTensors:
        return self._averaging.weights

    @property
    def _now(self) -> float:
        return self._mailbox.mailbox.clock.now()
