"""Calls under way in virtual time: one message, or a collective that advances while its rank computes."""

from collections.abc import Callable
from typing import final

from weft.distributed.collectives import CollectiveRounds
from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.group import AbstractWork
from weft.distributed.virtual.network import AbstractWait, UnexpectedMessage, VirtualNetwork
from weft.distributed.virtual.trace import TraceEvent
from weft.errors import PeerLostError

__all__ = ["CollectiveWork", "Membership", "MessageWork"]


@final
class Membership:
    """The ranks of one group, shared by all of them."""

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number = number
        self.ranks = ranks
        self.collectives: dict[tuple[int, int], CollectiveWork] = {}
        self.loss: tuple[int, str] | None = None

    def lose(self, rank: int, reason: str) -> None:
        if self.loss is None:
            self.loss = (self.ranks.index(rank), reason)

    def check(self) -> None:
        if self.loss is not None:
            peer, reason = self.loss
            raise PeerLostError(f"rank {peer} is lost (rank: {peer}, {reason}); start again without it", peer)


@final
class MessageWork(AbstractWork, AbstractWait):
    """A Send or Recv. `done_at` is known as soon as the message is on its way and, for a Recv, asked for."""

    __slots__ = ("collective", "done_at", "membership", "network", "peer", "rank", "tag", "tensor")

    def __init__(
        self,
        network: VirtualNetwork,
        membership: Membership,
        rank: int,
        call: Send | Recv,
        collective: "CollectiveWork | None" = None,
    ) -> None:
        self.network = network
        self.membership = membership
        self.rank = rank
        self.peer = membership.ranks[call.peer]
        self.tag = call.tag
        self.tensor = call.tensor
        self.collective = collective
        self.done_at: float | None = None

    def start(self, *, is_send: bool) -> None:
        """Start a message of a program, which may be of any shape and may be wrong."""
        self.tensor = self.tensor.detach()
        if is_send:
            self.done_at, message = self.network.send(
                (self.membership.number, self.rank, self.peer, self.tag), self.tensor
            )
            if message is not None:
                message.keep()
        else:
            channel = (self.membership.number, self.peer, self.rank, self.tag)
            self.done_at = self.network.take(channel, self.tensor)
            if self.done_at is None:
                self.network.post_receive(channel, self)

    def settle(self, moment: float) -> None:
        self.done_at = moment
        if self.collective is not None:
            self.collective.settle(moment)
        elif self.network.waits.get(self.rank) is self:
            self.network.scheduler.resume(self.rank)

    def wait(self) -> None:
        while self.done_at is None:
            self.membership.check()
            self.network.park(self.rank, self)
        self.network.scheduler.sleep_until(self.rank, self.done_at)

    def is_done(self) -> bool:
        self.network.scheduler.check()
        if self.done_at is None:
            return self.membership.loss is not None
        return self.done_at <= self.network.scheduler.now

    def awaited(self) -> list[int]:
        return [self.peer] if self.done_at is None else []

    def is_hopeless(self) -> bool:
        return self.membership.loss is not None

    def tell(self) -> str:
        return f"waits for rank {self.peer} (tag {self.tag})"


@final
class CollectiveWork(AbstractWork, AbstractWait):
    """A collective: advances by itself, at the moments when its rounds are done, whatever its rank does meanwhile."""

    def __init__(
        self,
        network: VirtualNetwork,
        membership: Membership,
        rank: int,
        *,
        number: int,
        rounds: CollectiveRounds,
        name: str,
    ) -> None:
        self.network = network
        self.membership = membership
        self.rank = rank
        self.number = number
        self.name = name
        self._rounds = rounds
        self._began = network.scheduler.now
        self._calls: list[Send | Recv] = []
        self._received: list[MessageWork] = []
        self._sent: list[UnexpectedMessage] = []
        self._num_awaited = 0
        self._round_ends = 0.0
        self._is_over = False
        self._error: Exception | None = None
        membership.collectives[number, rank] = self
        self._advance()

    def settle(self, moment: float) -> None:
        """A message of this round will be here at that moment."""
        if moment > self._round_ends:
            self._round_ends = moment
        self._num_awaited -= 1
        if self._num_awaited == 0:
            self.network.scheduler.at(self._round_ends, self.rank, self._advance)

    def wait(self) -> None:
        while not self._is_over:
            self.membership.check()
            self.network.park(self.rank, self)
        self.network.scheduler.check()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        self.network.scheduler.check()
        return self._is_over or self.membership.loss is not None

    def awaited(self) -> list[int]:
        return [work.peer for work in self._received if work.done_at is None] if self._num_awaited else []

    def is_hopeless(self) -> bool:
        return self.membership.loss is not None

    def tell(self) -> str:
        return f"waits in {self.name} for rank {', '.join(map(str, self.awaited()))}"

    def _advance(self) -> None:
        """The round is done: reduce, and begin the next one when that has taken its time."""
        for message in self._sent:
            message.keep()
        try:
            calls, bytes_reduced = next(self._rounds)
        except StopIteration as stop:
            self._then(stop.value * self.network.gamma, self._end)
        except Exception as error:
            self._error = error
            self._end()
        else:
            self._calls = calls
            self._then(bytes_reduced * self.network.gamma, self._begin_round)

    def _then(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds:
            self.network.scheduler.at(self.network.scheduler.now + seconds, self.rank, action)
        else:
            action()

    def _begin_round(self) -> None:
        network, number, ranks = self.network, self.membership.number, self.membership.ranks
        ends = network.scheduler.now
        self._received, self._sent = [], []
        for call in self._calls:
            peer = ranks[call.peer]
            if type(call) is Send:
                moment, message = network.send((number, self.rank, peer, call.tag), call.tensor)
                if message is not None:
                    self._sent.append(message)
            else:
                arrival = network.take((number, peer, self.rank, call.tag), call.tensor)
                if arrival is None:
                    work = MessageWork(network, self.membership, self.rank, call, self)
                    network.post_receive((number, peer, self.rank, call.tag), work)
                    self._received.append(work)
                    continue
                moment = arrival
            if moment > ends:
                ends = moment
        self._round_ends = ends
        self._num_awaited = len(self._received)
        if self._num_awaited == 0:
            network.scheduler.at(ends, self.rank, self._advance)

    def _end(self) -> None:
        network = self.network
        self._is_over = True
        del self.membership.collectives[self.number, self.rank]
        if network.trace is not None:
            network.trace.append(TraceEvent(self.rank, self._began, network.scheduler.now, self.name, "network"))
        if network.waits.get(self.rank) is self:
            network.scheduler.resume(self.rank)
