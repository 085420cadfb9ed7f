"""How a rank averages with its neighbours: with one in a turn (AD-PSGD, Lian et al., 2018), or all that are left.

rank 0, asks       | gradient g at x ................. | x <- mean - lr g |  gradient ...
                   \\-- x -->                   mean --/
rank 1, answers    | gradient h at y ....... y <- mean ........ | y <- y - lr h | ...

A rank that asks has one partner in a turn: it brings its weights before its gradient, and takes the answer, the mean of
the two, after it. The gradient is that of the weights before. A rank that answers has the mean at once, and puts its
own update on top when its gradient is there. Nobody waits for all, and a slow rank delays nobody.

With a codec weights are sent as q(x), the answer is q(y), and each end moves by half of the difference of the two.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec, PackedTensors, decode_packed, encode_packed
from weft.distributed.consistency.graphs import draw_all, weigh_alike
from weft.distributed.consistency.pairs.events import NOBODY, Mix, ReplayPlan, Step
from weft.distributed.consistency.pairs.protocol import RunMailbox, Tag, responder_address
from weft.distributed.group.calls import NeighbourGraph
from weft.distributed.group.dense import combine_neighbours
from weft.errors import PeerLostError
from weft.planning.gossip_graphs import Split

__all__ = ["AbstractAveraging", "NeighbourAveraging", "PairAveraging"]


class AbstractAveraging(ABC):
    """Of one rank in one training, which may be the replay of one."""

    def __init__(
        self, mailbox: RunMailbox, weights: PackedTensors, replay: ReplayPlan | None, codec: AbstractCodec
    ) -> None:
        self.mailbox = mailbox
        self.weights = weights
        self.replay = replay
        self.codec = codec
        self.sent: Sequence[Tensor] = ()  # in this turn

    def encode(self) -> Sequence[Tensor]:
        """The messages that are sent for the weights as they are now."""
        self.sent = encode_packed(self.codec, self.weights)
        return self.sent

    def drawn_to(self, others: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The weights, drawn to those that others sent, by what all see of them."""
        own = [message.clone() for message in self.weights.messages]
        seen, *theirs = [decode_packed(self.codec, self.weights, sent) for sent in (self.sent, *others)]
        draw_all(own, seen, theirs)
        return own

    @abstractmethod
    def set_out(self, turn: int) -> int:
        """Before the gradient: weights are sent. How many bytes."""

    @abstractmethod
    def take(self, turn: int) -> tuple[Sequence[Tensor] | None, Step | Mix]:
        """After it: the weights that it is applied to, None for those that are shared, and whose they are."""

    @abstractmethod
    def leave(self, turn: int) -> None:
        """This turn and those after it are not taken any more, although others may take them."""


@final
class PairAveraging(AbstractAveraging):
    """With one partner, chosen by chance, if this is a rank that asks (AD-PSGD)."""

    def __init__(
        self,
        mailbox: RunMailbox,
        weights: PackedTensors,
        replay: ReplayPlan | None,
        codec: AbstractCodec,
        *,
        split: Split,
        seed: int,
    ) -> None:
        super().__init__(mailbox, weights, replay, codec)
        self._split = split
        self._seed = seed
        self._partner = NOBODY

    def set_out(self, turn: int) -> int:
        """In a replay the weights also go to one that died before it could answer."""
        self._partner = self._choose(turn)
        chosen = () if self._partner == NOBODY else (self._partner,)
        asked = chosen if self.replay is None else self.replay.asks.get(turn, ())
        if not asked:
            return 0
        size, flats = self.mailbox.size, self.encode()
        return sum(self.mailbox.send(responder_address(size, partner), Tag.ASK, flats, turn=turn) for partner in asked)

    def take(self, turn: int) -> tuple[Sequence[Tensor] | None, Step]:
        """The partner's answer; if it dies, that of another; the weights as they are of a rank with nobody to ask."""
        answer: Sequence[Tensor] | None = None
        while answer is None and self._partner != NOBODY:
            try:
                answer = self.mailbox.receive_answer(Tag.PAIRED, self._partner, turn=turn).tensors
            except PeerLostError:
                if self.replay is not None:
                    raise
                self.set_out(turn)
        if answer is not None and not self.codec.is_exact:
            answer = self.drawn_to([answer])
        return answer, Step(turn, self._partner)

    def leave(self, turn: int) -> None:
        """Nobody waits for one that asks, and the responder goes on answering."""

    def _choose(self, turn: int) -> int:
        """By chance: one of the partners that are left; without any, one of all who answer and are left."""
        if self.replay is not None:
            return self.replay.partners.get(turn, NOBODY)
        rank, asks = self.mailbox.rank, self._split.asks
        if not asks[rank]:
            return NOBODY
        alive = self.mailbox.alive()
        partners = [r for r in alive if r in self._split.partners[rank]] or [r for r in alive if not asks[r]]
        return random.Random(f"pair {self._seed} {rank} {turn} {len(partners)}").choice(partners or [NOBODY])


@final
class NeighbourAveraging(AbstractAveraging):
    """With every neighbour that is left, each as loud as oneself (D-PSGD); of one that dies what it had sent counts.

    Without deaths this is X <- W X. Where a neighbour is missing the others count more: a row of W still sums to 1, a
    column need not.
    """

    def __init__(
        self,
        mailbox: RunMailbox,
        weights: PackedTensors,
        replay: ReplayPlan | None,
        codec: AbstractCodec,
        *,
        graph: NeighbourGraph,
    ) -> None:
        super().__init__(mailbox, weights, replay, codec)
        self._hears = graph[mailbox.rank]
        self._is_heard_by = [rank for rank, heard in enumerate(graph) if mailbox.rank in heard]
        self._silent: set[int] = set()  # those that have left, and live

    def set_out(self, turn: int) -> int:
        return self._send_to_all(self.encode(), turn)

    def take(self, turn: int) -> tuple[Sequence[Tensor], Mix]:
        found: dict[int, Sequence[Tensor]] = {}
        awaited = self._hears if self.replay is None else self.replay.mixes.get(turn, ())
        for rank in [rank for rank in awaited if rank not in self._silent]:
            try:
                tensors = self.mailbox.receive(Tag.WEIGHTS, rank, turn=turn).tensors
            except PeerLostError:
                if self.replay is not None:
                    raise
                continue
            if tensors:
                found[rank] = tensors
            else:
                self._silent.add(rank)
        others = list(found.values())
        mixed = mix(self.weights.messages, others) if self.codec.is_exact else self.drawn_to(others)
        return mixed, Mix(turn, tuple(found))

    def leave(self, turn: int) -> None:
        """Weights that are none tell the neighbours, who may wait for this rank already, to do without."""
        self._send_to_all((), turn)

    def _send_to_all(self, flats: Sequence[Tensor], turn: int) -> int:
        alive = self.mailbox.alive()
        listeners = [rank for rank in self._is_heard_by if rank in alive]
        return sum(self.mailbox.send(listener, Tag.WEIGHTS, flats, turn=turn) for listener in listeners)


def mix(own: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The mean, as `NeighbourAllReduce` of a group computes it."""
    totals = [flat.clone() for flat in own]
    for total, *flats in zip(totals, *others, strict=True):
        combine_neighbours(total, flats, weigh_alike(len(others)))
    return totals
