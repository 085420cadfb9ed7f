"""The answers to ranks and host servers when a shard lets ranks go."""

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from weft.distributed.consistency.server.decisions import Release
from weft.distributed.consistency.server.protocol import Tag
from weft.distributed.consistency.server.shard_state import ShardState

__all__ = ["Answers", "RankRecord"]


@dataclass
class RankRecord:
    """One rank in one training, as a shard knows it."""

    release: Release | None = None  # with which it was last let go; None while it waits
    last_step: int = -1  # of which it pushed a gradient
    is_known: bool = False  # this server has let it go before
    has_ended: bool = False  # it takes no more steps
    part: tuple[int, tuple[Tensor, ...]] | None = None  # step and tensors that came ahead of their push
    # How it is answered:
    host: int | None = None  # through this host server
    is_greeting: bool = False  # by a welcome
    wants_weights: bool = True
    centre: tuple[Tensor, ...] | None = None  # with the centre as its weights found it


@final
class Answers:
    """Ranks are answered at once, host servers for all of their ranks that were let go together.

    `loss` is that of the last update, where ranks are synchronous.
    """

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self.loss: float | None = None
        self._forwards: dict[int, tuple[int, int]] = {}  # by host server, its incarnation and the last number
        self._owed: dict[int, list[Release]] = {}  # by host server

    def expects(self, host: int, incarnation: int, number: int) -> bool:
        """Note a push of a host server; whether it is new."""
        is_new = (incarnation, number) > self._forwards.get(host, (-1, -1))
        if is_new:
            self._forwards[host] = incarnation, number
        return is_new

    def owe(self, host: int) -> None:
        """A host server is to be answered, whether or not ranks of it are let go."""
        self._owed.setdefault(host, [])

    def answer(self, record: RankRecord, release: Release) -> None:
        weights, more = self._state.shard.weights, tuple[Tensor, ...]()
        if record.host is not None:
            self._owed.setdefault(record.host, []).append(release)
            record.host = None
            return
        header: dict[str, Any] = {"step": release.step, "stop": release.stop}
        if self.loss is not None:
            header["loss"] = self.loss.hex()
        tag = Tag.WEIGHTS
        if record.is_greeting:
            record.is_greeting, tag, more = False, Tag.WELCOME, self._state.buffers
        elif record.centre is not None:
            weights, record.centre, header["moved"] = record.centre, None, True
        elif not record.wants_weights:
            weights, record.wants_weights = (), True
        self._state.send_weights(release.rank, tag, header, weights, more)

    def answer_hosts(self) -> None:
        """With the weights of now, and the number of the last push that was heard."""
        owed, self._owed = self._owed, {}
        for host, releases in owed.items():
            told = [[release.rank, release.step, release.stop] for release in releases]
            header = {"releases": told, "number": self._forwards[host][1]}
            self._state.send_weights(host, Tag.WEIGHTS, header, self._state.shard.weights)
