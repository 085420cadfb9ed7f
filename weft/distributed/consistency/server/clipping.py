"""Clipping over several shards: they tell each other the norms of their tensors, and all scale by the same factor.

shard 0   sum of round t    |w1|, |b2| ~~>|~~>   factor of (|w1|, |b1|, |w2|, |b2|)   update       tensors are whole:
shard 1      sum of round t    |w2|, |b1| ~~>|   the same factor                      update       the bits of one rank
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.control import MalformedError, read_int, read_ints
from weft.distributed.consistency.server.protocol import InitHeader, Tag
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.errors import PeerLostError
from weft.training.gradients import clip_factor

__all__ = ["NormExchange"]

PATIENCE_SECONDS = 60.0
"""How long a server waits for the others to be there when a training begins."""


@final
class NormExchange:
    """Every shard makes the same updates in the same order, and waits in each for the norms of all its peers."""

    def __init__(self, mailbox: AbstractMailbox, *, header: InitHeader, peers: Sequence[int]) -> None:
        self._mailbox = mailbox
        self._header = header
        self._peers = tuple(peers)
        self._update = -1  # the one that norms are exchanged for
        self._own: dict[int, Tensor] = {}
        self._given: dict[tuple[int, int], dict[int, Tensor]] = {}  # by update and shard; some are an update ahead
        self._lost: set[int] = set()
        mailbox.await_peers(peers, mailbox.clock.now() + PATIENCE_SECONDS)

    def has_started(self, update: int) -> bool:
        return update == self._update

    def start(self, update: int, norms: Sequence[Tensor | None]) -> None:
        """Tell the others the norms of this shard's sums."""
        self._update = update
        self._own = {p: n for p, n in zip(self._header.positions, norms, strict=True) if n is not None}
        header = {"run": self._header.run, "update": update, "positions": list(self._own)}
        # Of any type of number: in float64 each has the bits that it had.
        tensor = torch.stack([norm.double() for norm in self._own.values()]) if self._own else torch.zeros(0)
        for peer in self._peers:
            self._mailbox.start_send(peer, Tag.NORMS, header, [tensor])

    def take(self, message: Message) -> None:
        """Raises MalformedError."""
        positions, update = read_ints(message.header, "positions"), read_int(message.header, "update")
        if len(message.tensors) != 1 or message.tensors[0].numel() != len(positions):
            raise MalformedError("tensors")
        self._given[update, message.source] = dict(zip(positions, message.tensors[0], strict=True))

    def lose(self, peer: int) -> None:
        self._lost.add(peer)

    def take_factor(self) -> Tensor | None:
        """By which the sums of the update are scaled; None while norms of some shard are missing.

        Raises:
            PeerLostError: they will not come.
        """
        missing = [peer for peer in self._peers if (self._update, peer) not in self._given]
        for peer in self._lost.intersection(missing):
            text = f"server is lost that knows a part of the norm (peer: {peer}); start again"
            raise PeerLostError(text, peer)
        if missing:
            return None
        norms = dict(self._own)
        for peer in self._peers:
            norms |= self._given.pop((self._update, peer))
        limit = self._header.clip_norm
        if not norms or limit is None:
            return torch.ones(())
        # In the model's order: the norm of the norms has the same bits on every path.
        dtype = next(iter(self._own.values()), torch.zeros(())).dtype
        return clip_factor({str(position): norms[position].to(dtype) for position in sorted(norms)}, limit)
