"""The receiving side of a mailbox: an inbox and a roster of peers behind one monitor.

transport:  deliver(...)  join(...)  leave(...)          caller:  receive.wait()
                     \\__________ one monitor ___________/
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import final

from weft.distributed.group.clock import AbstractClock
from weft.distributed.mailbox.inbox import Inbox, ReceiveRequest
from weft.distributed.mailbox.mailbox import FOREVER, JOINED, LEFT, AbstractReceive, Into, Message, Sources, Tags
from weft.distributed.mailbox.monitor import AbstractMonitor
from weft.distributed.mailbox.receive_buffer import ReceiveBuffer, fits_in_place
from weft.distributed.mailbox.roster import Departure, Roster, lost_peer
from weft.errors import DeadlineError, TrainingError, UsageError
from weft.specs import TensorSpec

__all__ = ["Receive", "Receiver"]


@final
class Receiver:
    """Who is there, what has come, who waits. Every method may be called from any thread."""

    def __init__(self, address: int, incarnation: int, *, monitor: AbstractMonitor, roster: Roster) -> None:
        self.address = address
        self.incarnation = incarnation
        self.roster = roster
        self._monitor = monitor
        self._inbox = Inbox()
        self._refused: Counter[str] = Counter()
        self._follows = False
        self._is_closed = False
        self._failure: BaseException | None = None

    @property
    def clock(self) -> AbstractClock:
        return self._monitor.clock

    @property
    def follows(self) -> bool:
        """Whether the owner wants to be told who joins and leaves."""
        return self._follows

    # Called by the transport.

    def deliver(self, message: Message) -> None:
        with self._monitor.lock:
            self._monitor.notify(self._inbox.deliver(message))

    def begin_message(self, source: int, tag: str, specs: Sequence[TensorSpec]) -> ReceiveBuffer:
        """Where to write a message that is coming in: straight into the tensors of the request that it will complete,
        where they fit."""
        with self._monitor.lock:
            request = self._inbox.match(source, tag)
            if request is None or not fits_in_place(request, specs):
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
            if self._follows:
                self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self._monitor.notify()

    def leave(self, peer: int, incarnation: int, reason: str) -> None:
        """A peer has gone, unless a later incarnation has taken its place."""
        with self._monitor.lock:
            if self.roster.present.get(peer) == incarnation:
                self.roster.leave(peer, Departure(reason))
                self.lose(peer, incarnation, reason)

    def lose(self, peer: int, incarnation: int, reason: str, returned_as: int | None = None) -> None:
        """The news that a peer has gone, after all of its messages; it may have come back since."""
        with self._monitor.lock:
            completed = self._inbox.lose(peer, reason, returned_as)
            if self._follows:
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
            for peer, incarnation in () if self._follows else self.peers().items():
                self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self._follows = True
            self._monitor.notify()

    def await_peers(self, addresses: Collection[int], deadline: float) -> None:
        with self._monitor.lock:
            self.check_open()
            absent = sorted(set(addresses) - self.roster.present.keys() - {self.address})
            latest, before = self.roster.latest, dict(self.roster.latest)

            def find_missing() -> list[int]:
                return [peer for peer in absent if latest.get(peer) == before.get(peer)]

            self._monitor.wait(lambda: self._is_closed or not find_missing(), deadline, peers=absent)
            missing = find_missing()
            if missing:
                self.check_open()
                raise DeadlineError(
                    f"peers did not join in time (missing: {missing}); start them, or wait longer", tuple(missing)
                )

    def start_receive(self, tag: Tags, source: Sources, into: Into) -> "Receive":
        request = ReceiveRequest(tag, source, into)
        with self._monitor.lock:
            self.check_open()
            gone, now = self.roster.gone, self.clock.now()
            for peer in gone.keys() & (request.sources or ()):
                if gone[peer].last_arrivals.get(self.address, now) <= now:  # nothing of its is on the way
                    request.losses[peer] = gone[peer].reason
            request.num_joined = self.roster.num_joined
            self._inbox.add(request)
        return Receive(self, request)

    def cancel(self, request: ReceiveRequest) -> None:
        with self._monitor.lock:
            self._inbox.cancel(request)
            self._monitor.notify()

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float) -> int:
        requests = [_request_of(receive) for receive in receives]
        if not requests:
            raise UsageError("there is nothing to wait for (receives: 0); give at least one")
        with self._monitor.lock:
            self._monitor.wait(lambda: self._is_over(requests), deadline, requests)
            done = [index for index, request in enumerate(requests) if request.message is not None]
            if done:
                return min(done, key=lambda index: requests[index].number)
            self.check_open()
            if all(request.is_lost for request in requests):
                raise lost_peer(*min(requests[0].losses.items()))
            texts, awaited = zip(*(request.describe(self.peers()) for request in requests), strict=True)
            peers = tuple(sorted({peer for some in awaited for peer in some}))
            raise DeadlineError(f"nothing came in time ({'; or '.join(texts)}); wait longer, or go on without", peers)

    def is_done(self, request: ReceiveRequest) -> bool:
        self._monitor.check()
        with self._monitor.lock:
            return self._is_over([request])

    def _is_over(self, requests: Sequence[ReceiveRequest]) -> bool:
        is_done = any(request.message is not None for request in requests)
        return is_done or self._is_closed or all(request.is_lost for request in requests)


@final
class Receive(AbstractReceive):
    """A request, and the receiver that it waits at."""

    def __init__(self, receiver: Receiver, request: ReceiveRequest) -> None:
        self._receiver = receiver
        self.request = request

    def wait(self, deadline: float = FOREVER) -> Message:
        if not self.request.is_taken:
            self._receiver.wait_any([self], deadline)
        return self.request.take()

    def is_done(self) -> bool:
        return self.request.is_taken or self._receiver.is_done(self.request)

    def cancel(self) -> None:
        if not self.request.is_taken:
            self._receiver.cancel(self.request)


def _request_of(receive: AbstractReceive) -> ReceiveRequest:
    if not isinstance(receive, Receive):
        raise UsageError(f"receive is of another kind of mailbox ({type(receive).__name__}); use start_receive of this")
    return receive.request
