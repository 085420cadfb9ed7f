"""Messages and exchanges in virtual time: what is under way between ranks, and who waits for whom."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TypeVar, final

from torch import Tensor

from weft.distributed.collectives import Exchange
from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.group import AbstractWork
from weft.distributed.group.virtual.scheduler import Scheduler
from weft.distributed.group.virtual.trace import Span
from weft.errors import PeerLostError, UsageError
from weft.planning.network import LinkSchedule, Transfer

__all__ = ["AbstractGuest", "AbstractWait", "ExchangeWork", "Membership", "MessageWork", "PostOffice"]

Channel = tuple[int, int, int, int]
"""Membership, source, target (ranks of the cluster) and tag: messages of one channel keep their order."""


class AbstractWait(ABC):
    """What a parked rank waits for."""

    @abstractmethod
    def awaited(self) -> list[int]:
        """The ranks of the cluster whose step is needed; none where it is under way, or where any rank's will do."""

    @abstractmethod
    def is_hopeless(self) -> bool:
        """Whether the rank should be woken to learn that a peer is lost."""

    @abstractmethod
    def tell(self) -> str:
        """As a clause: `waits for rank 1 (tag 0)`."""


class AbstractGuest(ABC):
    """Another way to talk than a group, over the same ranks, links and time."""

    @abstractmethod
    def lose(self, rank: int, reason: str) -> None:
        """A rank is known to be lost."""

    @abstractmethod
    def end(self, rank: int) -> None:
        """The program of a rank has returned."""


GuestType = TypeVar("GuestType", bound=AbstractGuest)


@final
class Membership:
    """The ranks of one group, shared by all of them."""

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number = number
        self.ranks = ranks
        self.exchanges: dict[tuple[int, int], ExchangeWork] = {}
        self.loss: tuple[int, str] | None = None

    def lose(self, rank: int, reason: str) -> None:
        if self.loss is None:
            self.loss = (self.ranks.index(rank), reason)

    def check(self) -> None:
        if self.loss is not None:
            peer, reason = self.loss
            raise PeerLostError(f"rank {peer} is lost (rank: {peer}, {reason}); start again without it", peer)


@final
class Letter:
    """A message on its way that no one has asked for yet."""

    __slots__ = ("is_taken", "received", "tensor")

    def __init__(self, tensor: Tensor, received: float) -> None:
        self.tensor = tensor
        self.received = received
        self.is_taken = False

    def keep(self) -> None:
        """Copy the tensor, which its sender is about to change."""
        if not self.is_taken:
            self.tensor = self.tensor.clone()


@final
class MessageWork(AbstractWork, AbstractWait):
    """A Send or Recv. `done_at` is known as soon as the message is on its way and, for a Recv, asked for."""

    __slots__ = ("done_at", "exchange", "membership", "office", "peer", "rank", "tag", "tensor")

    def __init__(
        self,
        office: "PostOffice",
        membership: Membership,
        rank: int,
        call: Send | Recv,
        exchange: "ExchangeWork | None" = None,
    ) -> None:
        self.office = office
        self.membership = membership
        self.rank = rank
        self.peer = membership.ranks[call.peer]
        self.tag = call.tag
        self.tensor = call.tensor
        self.exchange = exchange
        self.done_at: float | None = None

    def settle(self, moment: float) -> None:
        self.done_at = moment
        if self.exchange is not None:
            self.exchange.settle(moment)
        elif self.office.waits.get(self.rank) is self:
            self.office.scheduler.resume(self.rank)

    def wait(self) -> None:
        while self.done_at is None:
            self.membership.check()
            self.office.park(self.rank, self)
        self.office.scheduler.sleep_until(self.rank, self.done_at)

    def is_done(self) -> bool:
        self.office.scheduler.check()
        if self.done_at is None:
            return self.membership.loss is not None
        return self.done_at <= self.office.scheduler.now

    def awaited(self) -> list[int]:
        return [self.peer] if self.done_at is None else []

    def is_hopeless(self) -> bool:
        return self.membership.loss is not None

    def tell(self) -> str:
        return f"waits for rank {self.peer} (tag {self.tag})"


@final
class ExchangeWork(AbstractWork, AbstractWait):
    """A collective: advances by itself, at the moments when its rounds are done, whatever its rank does meanwhile."""

    def __init__(
        self, office: "PostOffice", membership: Membership, rank: int, number: int, exchange: Exchange, what: str
    ) -> None:
        self.office = office
        self.membership = membership
        self.rank = rank
        self.number = number
        self.what = what
        self._exchange = exchange
        self._began = office.scheduler.now
        self._calls: list[Send | Recv] = []
        self._received: list[MessageWork] = []
        self._sent: list[Letter] = []
        self._num_awaited = 0
        self._round_ends = 0.0
        self._is_over = False
        self._error: Exception | None = None
        membership.exchanges[number, rank] = self
        self._advance()

    def settle(self, moment: float) -> None:
        """A message of this round will be here at that moment."""
        if moment > self._round_ends:
            self._round_ends = moment
        self._num_awaited -= 1
        if self._num_awaited == 0:
            self.office.scheduler.at(self._round_ends, self.rank, self._advance)

    def wait(self) -> None:
        while not self._is_over:
            self.membership.check()
            self.office.park(self.rank, self)
        self.office.scheduler.check()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        self.office.scheduler.check()
        return self._is_over or self.membership.loss is not None

    def awaited(self) -> list[int]:
        return [work.peer for work in self._received if work.done_at is None] if self._num_awaited else []

    def is_hopeless(self) -> bool:
        return self.membership.loss is not None

    def tell(self) -> str:
        return f"waits in {self.what} for rank {', '.join(map(str, self.awaited()))}"

    def _advance(self) -> None:
        """The round is done: reduce, and begin the next one when that has taken its time."""
        for letter in self._sent:
            letter.keep()
        try:
            calls, bytes_reduced = next(self._exchange)
        except StopIteration as stop:
            self._then(stop.value * self.office.gamma, self._end)
        except Exception as error:
            self._error = error
            self._end()
        else:
            self._calls = calls
            self._then(bytes_reduced * self.office.gamma, self._begin_round)

    def _then(self, seconds: float, action: Callable[[], None]) -> None:
        if seconds:
            self.office.scheduler.at(self.office.scheduler.now + seconds, self.rank, action)
        else:
            action()

    def _begin_round(self) -> None:
        office, number, ranks = self.office, self.membership.number, self.membership.ranks
        ends = office.scheduler.now
        self._received, self._sent = [], []
        for call in self._calls:
            peer = ranks[call.peer]
            if type(call) is Send:
                moment, letter = office.send((number, self.rank, peer, call.tag), call.tensor)
                if letter is not None:
                    self._sent.append(letter)
            else:
                arrival = office.take((number, peer, self.rank, call.tag), call.tensor)
                if arrival is None:
                    work = MessageWork(office, self.membership, self.rank, call, self)
                    office.expect((number, peer, self.rank, call.tag), work)
                    self._received.append(work)
                    continue
                moment = arrival
            if moment > ends:
                ends = moment
        self._round_ends = ends
        self._num_awaited = len(self._received)
        if self._num_awaited == 0:
            office.scheduler.at(ends, self.rank, self._advance)

    def _end(self) -> None:
        office = self.office
        self._is_over = True
        del self.membership.exchanges[self.number, self.rank]
        if office.spans is not None:
            office.spans.append(Span(self.rank, self._began, office.scheduler.now, self.what, "network"))
        if office.waits.get(self.rank) is self:
            office.scheduler.resume(self.rank)


@final
class PostOffice:
    """Matches sends with receives, books the links, and copies the tensors."""

    def __init__(self, scheduler: Scheduler, links: LinkSchedule, size: int, gamma: float, *, trace: bool) -> None:
        self.scheduler = scheduler
        self.gamma = gamma
        self.spans: list[Span] | None = [] if trace else None
        self.waits: dict[int, AbstractWait] = {}
        self.guests: dict[type[AbstractGuest], AbstractGuest] = {}
        self.bytes_sent = [0] * size
        self.num_messages = 0
        self._links = links
        self._letters: dict[Channel, deque[Letter]] = {}
        self._awaited: dict[Channel, deque[MessageWork]] = {}

    def find_guest(self, kind: type[GuestType], make: Callable[["PostOffice"], GuestType]) -> GuestType:
        """The one guest of this kind, made when it is first asked for."""
        if kind not in self.guests:
            self.guests[kind] = make(self)
        guest = self.guests[kind]
        assert isinstance(guest, kind)
        return guest

    def book(self, source: int, target: int, num_bytes: int) -> Transfer:
        """Take the links for a message that leaves now."""
        self.num_messages += 1
        self.bytes_sent[source] += num_bytes
        return self._links.transfer(source, target, num_bytes, self.scheduler.now)

    def park(self, rank: int, work: AbstractWait) -> None:
        """Let the rank wait for the work, or for the loss of a peer."""
        began = self.scheduler.now
        self.waits[rank] = work
        try:
            self.scheduler.park(rank)
        finally:
            del self.waits[rank]
        if self.spans is not None and self.scheduler.now > began:
            self.spans.append(Span(rank, began, self.scheduler.now, "wait"))

    def start(self, work: MessageWork, *, is_send: bool) -> None:
        """Start a message of a program, which may be of any shape and may be wrong."""
        work.tensor = work.tensor.detach()
        if is_send:
            channel = (work.membership.number, work.rank, work.peer, work.tag)
            work.done_at, letter = self.send(channel, work.tensor)
            if letter is not None:
                letter.keep()
        else:
            channel = (work.membership.number, work.peer, work.rank, work.tag)
            work.done_at = self.take(channel, work.tensor)
            if work.done_at is None:
                self.expect(channel, work)

    def send(self, channel: Channel, tensor: Tensor) -> tuple[float, Letter | None]:
        """Put a message on its way: when its last byte has left, and the letter where no one has asked for it yet."""
        _, source, target, _ = channel
        sent, received = self.book(source, target, tensor.nbytes)
        awaited = self._awaited.get(channel)
        if awaited is None:
            letter = Letter(tensor, received)
            self._letters.setdefault(channel, deque()).append(letter)
            return sent, letter
        receiver = awaited.popleft()
        if not awaited:
            del self._awaited[channel]
        # The receiver's tensor belongs to the call until it is done, so it may be filled before the message is there.
        _deliver(tensor, receiver.tensor)
        receiver.settle(received)
        return sent, None

    def take(self, channel: Channel, tensor: Tensor) -> float | None:
        """Copy the next message of the channel into the tensor: when it is there, or None where none was sent."""
        letters = self._letters.get(channel)
        if letters is None:
            return None
        letter = letters.popleft()
        if not letters:
            del self._letters[channel]
        _deliver(letter.tensor, tensor)
        letter.is_taken = True
        return max(letter.received, self.scheduler.now)

    def expect(self, channel: Channel, work: MessageWork) -> None:
        """Ask for the next message of the channel that will be sent."""
        self._awaited.setdefault(channel, deque()).append(work)


def _deliver(source: Tensor, target: Tensor) -> None:
    """Copy; both are outside autograd."""
    if source.shape == target.shape and source.dtype == target.dtype:
        target.copy_(source)
    elif source.numel() == target.numel() and source.dtype == target.dtype:
        target.copy_(source.reshape(target.shape))
    else:
        raise UsageError(
            f"message does not fit its receiver (sent: {tuple(source.shape)} {source.dtype}, "
            f"expected: {tuple(target.shape)} {target.dtype}); send and receive the same size and type"
        )
