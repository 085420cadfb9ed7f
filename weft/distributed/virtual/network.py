"""The network of the virtual cluster: sends matched with receives, links reserved, who waits for whom."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, final

from torch import Tensor

from weft.distributed.virtual.scheduler import Scheduler
from weft.distributed.virtual.trace import TraceEvent
from weft.errors import UsageError
from weft.planning.network import LinkSchedule, Transfer

__all__ = ["AbstractTransport", "AbstractWait", "Channel", "PostedReceive", "UnexpectedMessage", "VirtualNetwork"]

Channel = tuple[int, int, int, int]
"""Membership, source, target (ranks of the cluster) and tag: messages of one channel keep their order."""


class AbstractWait(ABC):
    """The reason for which a rank is parked."""

    @abstractmethod
    def awaited(self) -> list[int]:
        """The ranks of the cluster whose step is needed; none where it is under way, or where any rank's will do."""

    @abstractmethod
    def is_hopeless(self) -> bool:
        """Whether the rank should be woken to learn that a peer is lost."""

    @abstractmethod
    def tell(self) -> str:
        """As a clause: `waits for rank 1 (tag 0)`."""


class AbstractTransport(ABC):
    """Another way to talk than a group, over the same ranks, links and time."""

    @abstractmethod
    def lose(self, rank: int, reason: str) -> None:
        """A rank is known to be lost."""

    @abstractmethod
    def end(self, rank: int) -> None:
        """The program of a rank has returned."""


TransportType = TypeVar("TransportType", bound=AbstractTransport)


class PostedReceive(Protocol):
    """A receive whose message has not been sent yet."""

    tensor: Tensor

    def settle(self, moment: float) -> None:
        """The message is on its way, has been copied into the tensor, and counts as received at that moment."""


@final
class UnexpectedMessage:
    """A message on its way that no receive has asked for yet."""

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
class VirtualNetwork:
    """Matches sends with receives, reserves the links, and copies the tensors."""

    def __init__(self, scheduler: Scheduler, links: LinkSchedule, size: int, *, gamma: float, trace: bool) -> None:
        self.scheduler = scheduler
        self.gamma = gamma
        self.trace: list[TraceEvent] | None = [] if trace else None
        self.waits: dict[int, AbstractWait] = {}
        self.transports: dict[type[AbstractTransport], AbstractTransport] = {}
        self.bytes_sent = [0] * size
        self.num_messages = 0
        self._links = links
        self._unexpected: dict[Channel, deque[UnexpectedMessage]] = {}
        self._posted: dict[Channel, deque[PostedReceive]] = {}

    def find_transport(
        self, kind: type[TransportType], make: Callable[["VirtualNetwork"], TransportType]
    ) -> TransportType:
        """The one transport of this kind, made when it is first asked for."""
        if kind not in self.transports:
            self.transports[kind] = make(self)
        transport = self.transports[kind]
        assert isinstance(transport, kind)
        return transport

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
        if self.trace is not None and self.scheduler.now > began:
            self.trace.append(TraceEvent(rank, began, self.scheduler.now, "wait"))

    def send(self, channel: Channel, tensor: Tensor) -> tuple[float, UnexpectedMessage | None]:
        """Put a message on its way: when its last byte has left, and the message where no receive was posted for it."""
        _, source, target, _ = channel
        sent, received = self.book(source, target, tensor.nbytes)
        posted = self._posted.get(channel)
        if posted is None:
            message = UnexpectedMessage(tensor, received)
            self._unexpected.setdefault(channel, deque()).append(message)
            return sent, message
        receive = posted.popleft()
        if not posted:
            del self._posted[channel]
        # The receiver's tensor belongs to the call until it is done, so it may be filled before the message is there.
        _deliver(tensor, receive.tensor)
        receive.settle(received)
        return sent, None

    def take(self, channel: Channel, tensor: Tensor) -> float | None:
        """Copy the next message of the channel into the tensor: when it is there, or None where none was sent."""
        messages = self._unexpected.get(channel)
        if messages is None:
            return None
        message = messages.popleft()
        if not messages:
            del self._unexpected[channel]
        _deliver(message.tensor, tensor)
        message.is_taken = True
        return max(message.received, self.scheduler.now)

    def post_receive(self, channel: Channel, receive: PostedReceive) -> None:
        """Ask for the next message of the channel that will be sent."""
        self._posted.setdefault(channel, deque()).append(receive)


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
