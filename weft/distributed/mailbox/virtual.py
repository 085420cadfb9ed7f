"""Mailboxes of the virtual cluster: messages over modelled links, in virtual time."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.faulty import FaultyGroup
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.recording import RecordingGroup
from weft.distributed.mailbox.endpoint import AbstractEndpoint, lost_send
from weft.distributed.mailbox.inbox import ReceiveRequest
from weft.distributed.mailbox.mailbox import FOREVER, JOINED, Message
from weft.distributed.mailbox.receiver import AbstractMonitor, Awaited, Receiver, Roster
from weft.distributed.virtual import AbstractTransport, AbstractWait, TraceEvent, VirtualGroup, VirtualNetwork
from weft.errors import UsageError

__all__ = ["VirtualMailbox"]


@final
class VirtualMailbox(AbstractEndpoint):
    """A mailbox for the rank of a virtual group; its address is the rank in the whole cluster.

    A peer is there from when it opens its mailbox until it closes it, dies or its program returns. Polling takes no
    virtual time: a loop that only polls never ends; charge or wait in between.

    >>> import torch
    >>> from weft.distributed.virtual import run_virtual
    >>> def program(group):
    ...     mailbox = VirtualMailbox(group)
    ...     mailbox.await_peers({0, 1})
    ...     if mailbox.address == 1:
    ...         mailbox.send(0, "push", {"step": 7}, [torch.ones(2)])
    ...         return None
    ...     message = mailbox.receive("push")
    ...     return message.source, message.header["step"]
    >>> run_virtual(program, 2).results
    ((1, 7), None)
    """

    def __init__(self, group: AbstractGroup) -> None:
        virtual = _unwrap(group)
        self._transport = virtual.network.find_transport(_VirtualTransport, _VirtualTransport)
        super().__init__(self._transport.join(virtual.cluster_rank, group.clock))

    def _transmit(self, to: int, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        if to not in self._receiver.roster.present:
            return lost_send(self._receiver.roster.explain_absence(to))
        num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        return self._transport.send(to, self._copy_message(tag, header, tensors), num_bytes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        self._transport.leave(self._receiver, "it left")


@final
class _VirtualTransport(AbstractTransport):
    """Carries messages between the mailboxes of one virtual cluster, and the news of who joins and leaves.

    Time passes and ranks change only through the scheduler, so nothing here needs a lock.
    """

    def __init__(self, network: VirtualNetwork) -> None:
        self._network = network
        self._scheduler = network.scheduler
        self._roster = Roster()
        self._receivers: dict[int, Receiver] = {}
        self._returned_as: dict[int, int] = {}  # incarnation -> the next one of the same rank

    def join(self, rank: int, clock: AbstractClock) -> Receiver:
        if rank in self._receivers:
            raise UsageError(f"address is taken (address: {rank}); close its mailbox before")
        incarnation = self._roster.num_joined
        if rank in self._roster.latest:
            self._returned_as[self._roster.latest[rank]] = incarnation
        self._roster.join(rank, incarnation)
        joined = Message(rank, JOINED, {}, incarnation=incarnation)
        for other, receiver in self._receivers.items():
            if receiver.follows:  # told after the last message of the incarnation before, and the news of its end
                moment = max(self._scheduler.now, self._roster.last_arrivals.get((rank, other), 0.0))
                self._scheduler.at(moment, other, partial(self._deliver, receiver, joined))
        monitor = _VirtualMonitor(self._network, rank, clock)
        self._receivers[rank] = Receiver(rank, incarnation, monitor=monitor, roster=self._roster)
        self._wake_those_who_await(rank)
        return self._receivers[rank]

    def leave(self, receiver: Receiver, reason: str) -> None:
        """Each of the others learns that a peer has left after its last message there."""
        if not receiver.close():
            return
        rank = receiver.address
        del self._receivers[rank]
        self._roster.leave(rank, reason)
        for other, its in self._receivers.items():
            tell = partial(self._tell_left, its, rank, receiver.incarnation, reason)
            # Of earlier incarnations too: the news that this one has ended may not overtake their messages.
            last_arrival = self._roster.last_arrivals.get((rank, other), 0.0)
            if last_arrival > self._scheduler.now:
                self._scheduler.at(last_arrival, other, tell)
            else:
                tell()
        self._wake_those_who_await(rank)

    def _wake_those_who_await(self, rank: int) -> None:
        for waiting, wait in self._network.waits.items():
            if isinstance(wait, _MailboxWait) and rank in wait.peers:
                self._scheduler.resume(waiting)

    def lose(self, rank: int, reason: str) -> None:
        if rank in self._receivers:
            self.leave(self._receivers[rank], reason)

    def end(self, rank: int) -> None:
        self.lose(rank, "it ended")

    def send(self, to: int, message: Message, num_bytes: int) -> "_VirtualSend":
        """Put a message on its way."""
        source = message.source
        sent, received = self._network.book(source, to, num_bytes)
        self._roster.last_arrivals[source, to] = received
        self._scheduler.at(received, to, partial(self._deliver, self._receivers[to], message))
        if self._network.trace is not None:
            event = TraceEvent(source, self._scheduler.now, received, f"send {message.tag}", "network")
            self._network.trace.append(event)
        return _VirtualSend(self._network, source, sent)

    def _deliver(self, receiver: Receiver, message: Message) -> None:
        """A message has arrived; one for an earlier incarnation of the peer is refused."""
        current = self._receivers.get(receiver.address)
        if current is receiver:
            receiver.deliver(message)
        elif current is not None:
            current.refuse("late")

    def _tell_left(self, receiver: Receiver, rank: int, incarnation: int, reason: str) -> None:
        if self._receivers.get(receiver.address) is receiver:
            receiver.lose(rank, incarnation, reason, self._returned_as.get(incarnation))


@final
class _MailboxWait(AbstractWait):
    """A rank that waits for a message or for peers."""

    def __init__(self, awaited: Awaited) -> None:
        self.request = awaited if isinstance(awaited, ReceiveRequest) else None
        self.peers = () if isinstance(awaited, ReceiveRequest) else awaited

    def awaited(self) -> list[int]:
        return []  # a mailbox's peers are lost when they die, never because they say nothing

    def is_hopeless(self) -> bool:
        return False  # the transport itself wakes those who wait for a peer that has gone

    def tell(self) -> str:
        if self.request is not None:
            return f"waits for a message ({self.request.describe(())[0]})"
        return f"waits for peer {', '.join(map(str, sorted(self.peers)))} to join"


@final
class _VirtualMonitor(AbstractMonitor):
    """Parks the rank that waits. One rank runs at a time, so there is nothing to lock."""

    def __init__(self, network: VirtualNetwork, rank: int, clock: AbstractClock) -> None:
        self.lock = nullcontext()
        self.clock = clock
        self._network = network
        self._scheduler = network.scheduler
        self._rank = rank

    def check(self) -> None:
        self._scheduler.check()

    def wait(self, is_over: Callable[[], bool], deadline: float, awaited: Awaited) -> None:
        self._scheduler.check()
        wait = _MailboxWait(awaited)
        if FOREVER > deadline > self._scheduler.now and not is_over():
            self._scheduler.at(deadline, self._rank, partial(self._expire, wait))
        while not is_over() and self._scheduler.now < deadline:
            self._network.park(self._rank, wait)

    def notify(self, requests: Collection[ReceiveRequest] = ()) -> None:
        wait = self._network.waits.get(self._rank)
        if isinstance(wait, _MailboxWait) and wait.request in requests:
            self._scheduler.resume(self._rank)

    def _expire(self, wait: _MailboxWait) -> None:
        if self._network.waits.get(self._rank) is wait:
            self._scheduler.resume(self._rank)


@final
class _VirtualSend(AbstractWork):
    """Done when the last byte has left."""

    def __init__(self, network: VirtualNetwork, rank: int, done_at: float) -> None:
        self._scheduler = network.scheduler
        self._rank = rank
        self._done_at = done_at

    def wait(self) -> None:
        self._scheduler.sleep_until(self._rank, self._done_at)

    def is_done(self) -> bool:
        self._scheduler.check()
        return self._done_at <= self._scheduler.now


def _unwrap(group: AbstractGroup) -> VirtualGroup:
    while isinstance(group, FaultyGroup | RecordingGroup):
        group = group.inner
    if not isinstance(group, VirtualGroup):
        raise UsageError(f"group is not of the virtual cluster ({type(group).__name__}); use run_virtual")
    return group
