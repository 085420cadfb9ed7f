"""The receiving side of a mailbox: an inbox and a roster of peers behind one monitor.

transport:  deliver(...)  join(...)  leave(...)          caller:  receive.wait()
                     \\__________ one monitor ___________/
"""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import final

from weft.distributed.group.clock import AbstractClock, RealClock
from weft.distributed.mailbox.inbox import Inbox, ReceiveBuffer, ReceiveRequest
from weft.distributed.mailbox.mailbox import FOREVER, JOINED, LEFT, AbstractReceive, Into, Message, Sources, Tags
from weft.errors import DeadlineError, PeerLostError, TrainingError, UsageError
from weft.specs import TensorSpec

__all__ = ["AbstractMonitor", "Awaited", "Receiver", "Roster", "ThreadMonitor", "lost_peer"]


@final
class Roster:
    """Who is there and who has gone, by address. Of one receiver, or of all at once where time is virtual."""

    def __init__(self) -> None:
        self.present: dict[int, int] = {}  # incarnation
        self.latest: dict[int, int] = {}  # incarnation, also of those who have gone
        self.gone: dict[int, str] = {}  # the reason
        # By source and target, where messages take virtual time: when the last one arrives.
        self.last_arrivals: dict[tuple[int, int], float] = {}
        self.num_joined = 0

    def join(self, peer: int, incarnation: int) -> None:
        self.present[peer] = self.latest[peer] = incarnation
        self.gone.pop(peer, None)
        self.num_joined += 1

    def leave(self, peer: int, reason: str) -> None:
        del self.present[peer]
        self.gone[peer] = reason

    def explain_absence(self, peer: int) -> PeerLostError:
        """The error for a send to a peer that is not there."""
        return lost_peer(peer, self.gone.get(peer))


def lost_peer(peer: int, reason: str | None) -> PeerLostError:
    """The error for a peer that has gone for this reason, or, without one, has never been there."""
    if reason is None:
        return PeerLostError(f"peer has not joined (peer: {peer}); start it, or wait for it with await_peers", peer)
    return PeerLostError(f"peer {peer} is lost (peer: {peer}, reason: {reason}); go on without it", peer)


Awaited = ReceiveRequest | Collection[int]
"""A request, or peers that are to join."""


class AbstractMonitor(ABC):
    """Guards the state of a receiver with a lock, and lets callers sleep until it changes."""

    lock: AbstractContextManager[object]
    clock: AbstractClock

    @abstractmethod
    def check(self) -> None:
        """Raise where the caller's thread must end."""

    @abstractmethod
    def wait(self, is_over: Callable[[], bool], deadline: float, awaited: Awaited) -> None:
        """Sleep until `is_over` or the deadline. The lock is held, and let go meanwhile.

        Args:
            awaited: wake up when this request is completed or lost, or when one of these peers joins.
        """

    @abstractmethod
    def notify(self, requests: Collection[ReceiveRequest] = ()) -> None:
        """Wake those who wait for one of these requests, or for something else that has changed."""


@final
class ThreadMonitor(AbstractMonitor):
    """A condition variable: callers are threads, and time is real."""

    def __init__(self) -> None:
        self.lock = self._condition = threading.Condition()
        self.clock = RealClock()

    def check(self) -> None:
        pass

    def wait(self, is_over: Callable[[], bool], deadline: float, awaited: Awaited) -> None:
        while not is_over() and (remaining := deadline - self.clock.now()) > 0:
            self._condition.wait(min(remaining, threading.TIMEOUT_MAX))

    def notify(self, requests: Collection[ReceiveRequest] = ()) -> None:
        self._condition.notify_all()


@final
class Receiver:
    """Who is there, what has come, who waits. Every method may be called from any thread."""

    def __init__(self, address: int, incarnation: int, *, monitor: AbstractMonitor, roster: Roster) -> None:
        self.address = address
        self.incarnation = incarnation
        self.clock = monitor.clock
        self.roster = roster
        self.follows = False  # whether the owner wants to be told who joins and leaves
        self._monitor = monitor
        self._inbox = Inbox()
        self._refused: Counter[str] = Counter()
        self._is_closed = False
        self._failure: BaseException | None = None

    # Called by the transport.

    def deliver(self, message: Message) -> None:
        with self._monitor.lock:
            self._monitor.notify(self._inbox.deliver(message))

    def begin_message(self, source: int, tag: str, specs: Sequence[TensorSpec]) -> ReceiveBuffer:
        """Where to write a message that is coming in: straight into the tensors of the request that it will complete,
        where they fit."""
        with self._monitor.lock:
            request = self._inbox.match(source, tag)
            if request is None or not request.fits_in_place(specs):
                return ReceiveBuffer(None, specs)
            buffer = ReceiveBuffer(request, specs)
            request.detach = buffer.detach
            return buffer

    def end_message(self, buffer: ReceiveBuffer, message: Message) -> None:
        """The message is complete."""
        with self._monitor.lock:
            message = replace(message, tensors=buffer.tensors)
            if buffer.request is not None:
                self._inbox.complete_in_place(buffer.request, message)
            else:
                self._inbox.deliver(message)
            self._monitor.notify()

    def abandon_message(self, buffer: ReceiveBuffer) -> None:
        """The rest of the message will not come."""
        with self._monitor.lock:
            if buffer.request is not None:
                self._inbox.release(buffer.request)
            self._monitor.notify()

    def join(self, peer: int, incarnation: int) -> None:
        with self._monitor.lock:
            self.roster.join(peer, incarnation)
            if self.follows:
                self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self._monitor.notify()

    def leave(self, peer: int, incarnation: int, reason: str) -> None:
        """A peer has gone, unless a later incarnation has taken its place."""
        with self._monitor.lock:
            if self.roster.present.get(peer) == incarnation:
                self.roster.leave(peer, reason)
                self.lose(peer, incarnation, reason)

    def lose(self, peer: int, incarnation: int, reason: str, returned_as: int | None = None) -> None:
        """The news that a peer has gone, after all of its messages; it may have come back since."""
        with self._monitor.lock:
            completed = self._inbox.lose(peer, reason, returned_as)
            if self.follows:
                completed += self._inbox.deliver(Message(peer, LEFT, {"reason": reason}, incarnation=incarnation))
            self._monitor.notify(completed)

    def refuse(self, reason: str) -> None:
        """Count what was refused."""
        with self._monitor.lock:
            self._refused[reason] += 1

    def close(self, failure: BaseException | None = None) -> bool:
        """End all waiting, with an error that names the failure if there is one; whether this is the first time."""
        with self._monitor.lock:
            was_closed, self._is_closed = self._is_closed, True
            self._failure = failure or self._failure
            self._monitor.notify()
            return not was_closed

    # Called by the mailbox's owner.

    def check_open(self) -> None:
        self._monitor.check()
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise TrainingError(
                f"mailbox has failed (address: {self.address}, cause: {cause}); open a new one"
            ) from self._failure
        if self._is_closed:
            raise UsageError(f"mailbox is closed (address: {self.address}); open a new one")

    def peers(self) -> dict[int, int]:
        with self._monitor.lock:
            return {peer: self.roster.present[peer] for peer in sorted(self.roster.present) if peer != self.address}

    def refusals(self) -> dict[str, int]:
        with self._monitor.lock:
            return dict(sorted(self._refused.items()))

    def follow_peers(self) -> None:
        with self._monitor.lock:
            self.check_open()
            for peer, incarnation in () if self.follows else self.peers().items():
                self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self.follows = True
            self._monitor.notify()

    def await_peers(self, addresses: Collection[int], deadline: float) -> None:
        with self._monitor.lock:
            self.check_open()
            absent = sorted(set(addresses) - self.roster.present.keys() - {self.address})
            latest, before = self.roster.latest, dict(self.roster.latest)

            def find_missing() -> list[int]:
                return [peer for peer in absent if latest.get(peer) == before.get(peer)]

            self._monitor.wait(lambda: self._is_closed or not find_missing(), deadline, absent)
            missing = find_missing()
            if missing:
                self.check_open()
                raise DeadlineError(
                    f"peers did not join in time (missing: {missing}); start them, or wait longer", tuple(missing)
                )

    def start_receive(self, tag: Tags, source: Sources, into: Into) -> AbstractReceive:
        request = ReceiveRequest(tag, source, into)
        with self._monitor.lock:
            self.check_open()
            gone, last_arrivals, now = self.roster.gone, self.roster.last_arrivals, self.clock.now()
            for peer in gone.keys() & (request.sources or ()):
                if last_arrivals.get((peer, self.address), now) <= now:  # nothing of its is on the way
                    request.losses[peer] = gone[peer]
            request.num_joined = self.roster.num_joined
            self._inbox.add(request)
        return _Receive(self, request)

    def cancel(self, request: ReceiveRequest) -> None:
        with self._monitor.lock:
            self._inbox.cancel(request)
            self._monitor.notify()

    def wait(self, request: ReceiveRequest, deadline: float) -> None:
        """Return when the request is completed; raises as `AbstractReceive.wait` does."""
        with self._monitor.lock:
            self._monitor.wait(lambda: self._is_over(request), deadline, request)
            if request.message is not None:
                return
            self.check_open()
            if request.is_lost:
                raise lost_peer(*min(request.losses.items()))
            text, awaited = request.describe(self.peers())
            raise DeadlineError(f"nothing came in time ({text}); wait longer, or go on without", awaited)

    def is_done(self, request: ReceiveRequest) -> bool:
        self._monitor.check()
        with self._monitor.lock:
            return self._is_over(request)

    def _is_over(self, request: ReceiveRequest) -> bool:
        return request.message is not None or self._is_closed or request.is_lost


@final
class _Receive(AbstractReceive):
    def __init__(self, receiver: Receiver, request: ReceiveRequest) -> None:
        self._receiver = receiver
        self._request = request

    def wait(self, deadline: float = FOREVER) -> Message:
        if not self._request.is_taken:
            self._receiver.wait(self._request, deadline)
        return self._request.take()

    def is_done(self) -> bool:
        return self._request.is_taken or self._receiver.is_done(self._request)

    def cancel(self) -> None:
        if not self._request.is_taken:
            self._receiver.cancel(self._request)
