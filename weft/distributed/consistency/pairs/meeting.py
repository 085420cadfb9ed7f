"""How a rank meets its neighbours in a turn: one of them (AD-PSGD, Lian et al., 2018), or all that are left.

rank 0, asks       | gradient g at x ................. | x <- mean - lr g |  gradient ...
                   \\-- x -->                   mean --/
rank 1, answers    | gradient h at y ....... y <- mean ........ | y <- y - lr h | ...

A rank that asks has one partner in a turn: it brings its weights before its gradient, and takes the answer, the mean of
the two, after it. The gradient is that of the weights before. A rank that answers has the mean at once, and puts its
own update on top when its gradient is there. Nobody waits for all, and a slow rank delays nobody.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.pairs.events import NOBODY, Mix, Step
from weft.distributed.consistency.pairs.journal import Script
from weft.distributed.consistency.pairs.post import Post
from weft.distributed.consistency.pairs.protocol import Tag, desk_address
from weft.distributed.consistency.pairs.slot import Weights
from weft.distributed.group.calls import NeighbourGraph
from weft.errors import PeerLostError
from weft.planning.gossip_graphs import Split

__all__ = ["AbstractMeeting", "MixMeeting", "PairMeeting"]


class AbstractMeeting(ABC):
    """Knows the post, and in a training the rank's weights."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.seed = 0
        self.weights: Weights | None = None
        self.script: Script | None = None

    def begin(self, seed: int, weights: Weights, script: Script | None) -> None:
        """A training begins; with a script, one that was."""
        self.seed, self.weights, self.script = seed, weights, script

    @property
    def own(self) -> Weights:
        assert self.weights is not None, "begin() comes first"
        return self.weights

    @abstractmethod
    def set_out(self, turn: int) -> int:
        """Before the gradient: weights are sent. How many bytes."""

    @abstractmethod
    def take(self, turn: int) -> tuple[Sequence[Tensor] | None, Step | Mix]:
        """After it: the weights that it is applied to, None for those in the slot, and whose they are."""

    @abstractmethod
    def leave(self, turn: int) -> None:
        """This turn and those after it are not taken any more, although others may take them."""


@final
class PairMeeting(AbstractMeeting):
    """With one partner, if this is a rank that asks (AD-PSGD)."""

    def __init__(self, post: Post, split: Split) -> None:
        super().__init__(post)
        self._split = split
        self._partner = NOBODY

    def set_out(self, turn: int) -> int:
        """In a replay the weights also go to one that died before it could answer."""
        self._partner = self._choose(turn)
        chosen = () if self._partner == NOBODY else (self._partner,)
        asked = chosen if self.script is None else self.script.asks.get(turn, ())
        size, flats = self.post.size, self.own.flats
        return sum(self.post.send(desk_address(size, partner), Tag.ASK, flats, turn=turn) for partner in asked)

    def take(self, turn: int) -> tuple[Sequence[Tensor] | None, Step]:
        """The partner's answer; if it dies, that of another; the weights as they are of a rank with nobody to ask."""
        mean: Sequence[Tensor] | None = None
        while mean is None and self._partner != NOBODY:
            try:
                mean = self.post.receive(Tag.PAIRED, desk_address(self.post.size, self._partner), turn=turn).tensors
            except PeerLostError:
                if self.script is not None:
                    raise
                self.set_out(turn)
        return mean, Step(turn, self._partner)

    def leave(self, turn: int) -> None:
        """Nobody waits for one that asks, and the desk goes on answering."""

    def _choose(self, turn: int) -> int:
        """By chance: one of the partners that are left; without any, one of all who answer and are left."""
        if self.script is not None:
            return self.script.partners.get(turn, NOBODY)
        rank, asks = self.post.rank, self._split.asks
        if not asks[rank]:
            return NOBODY
        alive = self.post.alive()
        partners = [r for r in alive if r in self._split.partners[rank]] or [r for r in alive if not asks[r]]
        return random.Random(f"pair {self.seed} {rank} {turn} {len(partners)}").choice(partners or [NOBODY])


@final
class MixMeeting(AbstractMeeting):
    """With every neighbour that is left, each as loud as oneself (D-PSGD); of one that dies what it had sent counts.

    Without deaths this is X <- W X. Where a neighbour is missing the others count more: a row of W still sums to 1, a
    column need not.
    """

    def __init__(self, post: Post, graph: NeighbourGraph) -> None:
        super().__init__(post)
        self._hears = graph[post.rank]
        self._is_heard_by = [rank for rank, heard in enumerate(graph) if post.rank in heard]
        self._silent: set[int] = set()  # those that have left, and live

    def begin(self, seed: int, weights: Weights, script: Script | None) -> None:
        super().begin(seed, weights, script)
        self._silent = set()

    def set_out(self, turn: int) -> int:
        return self._send_to_all(self.own.flats, turn)

    def take(self, turn: int) -> tuple[Sequence[Tensor], Mix]:
        found: dict[int, Sequence[Tensor]] = {}
        awaited = self._hears if self.script is None else self.script.mixes.get(turn, ())
        for rank in [rank for rank in awaited if rank not in self._silent]:
            try:
                tensors = self.post.receive(Tag.WEIGHTS, rank, turn=turn).tensors
            except PeerLostError:
                if self.script is not None:
                    raise
                continue
            if tensors:
                found[rank] = tensors
            else:
                self._silent.add(rank)
        return mix(self.own.flats, list(found.values())), Mix(turn, tuple(found))

    def leave(self, turn: int) -> None:
        """Weights that are none tell the neighbours, who may wait for this rank already, to do without."""
        self._send_to_all((), turn)

    def _send_to_all(self, flats: Sequence[Tensor], turn: int) -> int:
        alive = self.post.alive()
        listeners = [rank for rank in self._is_heard_by if rank in alive]
        return sum(self.post.send(listener, Tag.WEIGHTS, flats, turn=turn) for listener in listeners)


def mix(own: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The mean, added as `NeighbourAllReduce` adds: one's own first, then the others in their order."""
    weight = 1 / (1 + len(others))
    totals = [flat * weight for flat in own]
    for flats in others:
        for total, flat in zip(totals, flats, strict=True):
            torch.add(total, flat, alpha=weight, out=total)
    return totals
