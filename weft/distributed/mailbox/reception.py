"""The receiving side of the mailboxes that live in real time: an inbox and a roster behind one lock.

transport's thread:  deliver(...)  join(...)  leave(...)          caller's thread:  receive.wait()
                              \\__________ one lock, one condition __________/
"""

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.distributed.group.clock import RealClock
from weft.distributed.mailbox.inbox import Ask, Inbox
from weft.distributed.mailbox.landing import Landing, fits_in_place
from weft.distributed.mailbox.mailbox import FOREVER, JOINED, LEFT, AbstractReceive, Message, Sources, Tags
from weft.errors import DeadlineError, PeerLostError, TrainingError, UsageError
from weft.specs import TensorSpec

__all__ = ["Reception", "explain_deadline", "explain_gone", "explain_loss"]


def explain_gone(peer: int, reason: str | None) -> PeerLostError:
    """The error for a peer that is not there; no reason for one that has never been."""
    if reason is None:
        return PeerLostError(f"peer has not joined (peer: {peer}); start it, or wait for it with await_peers", peer)
    return PeerLostError(f"peer {peer} is lost (peer: {peer}, reason: {reason}); go on without it", peer)


def explain_loss(ask: Ask) -> PeerLostError:
    """The error for an ask of which every source has gone."""
    peer = min(ask.losses)
    return explain_gone(peer, ask.losses[peer])


def explain_deadline(asks: Sequence[Ask], peers: Collection[int]) -> DeadlineError:
    texts, awaited = zip(*(ask.describe(peers) for ask in asks), strict=True)
    everyone = tuple(sorted({peer for some in awaited for peer in some}))
    return DeadlineError(f"nothing came in time ({'; or '.join(texts)}); wait longer, or go on without", everyone)


@final
class Reception:
    """Who is there, what has come, who waits. Every method may be called from any thread."""

    def __init__(self, address: int, incarnation: int) -> None:
        self.address = address
        self.incarnation = incarnation
        self.clock = RealClock()
        self._changed = threading.Condition()
        self._inbox = Inbox()
        self._present: dict[int, int] = {}
        self._latest: dict[int, int] = {}  # incarnation, also of those who have gone
        self._gone: dict[int, str] = {}
        self._refused: Counter[str] = Counter()
        self._follows = False
        self._is_closed = False
        self._failure: BaseException | None = None

    # What the transport tells.

    def deliver(self, message: Message) -> None:
        with self._changed:
            self._inbox.deliver(message)
            self._changed.notify_all()

    def begin(self, source: int, tag: str, specs: Sequence[TensorSpec]) -> Landing:
        """Where to write a message that is coming in: at once where it was asked to be, if it will go there."""
        with self._changed:
            ask = self._inbox.find(source, tag)
            if ask is None or not fits_in_place(ask, specs):
                return Landing(None, specs)
            landing = Landing(ask, specs)
            ask.is_claimed, ask.evacuate = True, landing.evacuate
            return landing

    def end(self, landing: Landing, message: Message) -> None:
        """The message has come in."""
        with self._changed:
            message = replace(message, tensors=landing.tensors)
            if landing.ask is not None:
                self._inbox.settle(landing.ask, message)
            else:
                self._inbox.deliver(message)
            self._changed.notify_all()

    def give_up(self, landing: Landing) -> None:
        """The rest of the message will not come."""
        with self._changed:
            if landing.ask is not None:
                self._inbox.release(landing.ask)
            self._changed.notify_all()

    def join(self, peer: int, incarnation: int) -> None:
        with self._changed:
            self._present[peer] = self._latest[peer] = incarnation
            self._gone.pop(peer, None)
            if self._follows:
                self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self._changed.notify_all()

    def leave(self, peer: int, incarnation: int, reason: str) -> None:
        """Nothing happens where a later life of the peer has taken its place."""
        with self._changed:
            if self._present.get(peer) != incarnation:
                return
            del self._present[peer]
            self._gone[peer] = reason
            self._inbox.lose(peer, reason)
            if self._follows:
                self._inbox.deliver(Message(peer, LEFT, {"reason": reason}, incarnation=incarnation))
            self._changed.notify_all()

    def refuse(self, reason: str) -> None:
        with self._changed:
            self._refused[reason] += 1

    def close(self) -> bool:
        """End all waiting; whether this is the first time."""
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
            return not was_closed

    def fail(self, cause: BaseException) -> None:
        """The transport cannot go on: end all waiting, and tell those who wait why."""
        with self._changed:
            self._failure = cause
            self._is_closed = True
            self._changed.notify_all()

    # What the mailbox's owner asks.

    def check_open(self) -> None:
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise TrainingError(
                f"mailbox has failed (address: {self.address}, cause: {cause}); open a new one"
            ) from self._failure
        if self._is_closed:
            raise UsageError(f"mailbox is closed (address: {self.address}); open a new one")

    def find_loss(self, peer: int) -> PeerLostError | None:
        """Why a message cannot be sent to a peer; None where it can."""
        with self._changed:
            is_there = peer in self._present or peer == self.address
            return None if is_there else explain_gone(peer, self._gone.get(peer))

    def find_latest(self, peer: int) -> int:
        """The incarnation of a peer's last life that was here; -1 where there was none."""
        with self._changed:
            return self._latest.get(peer, -1)

    def has_gone(self, peer: int) -> bool:
        with self._changed:
            return peer in self._gone

    def peers(self) -> dict[int, int]:
        with self._changed:
            return dict(sorted(self._present.items()))

    def refusals(self) -> dict[str, int]:
        with self._changed:
            return dict(sorted(self._refused.items()))

    def follow_peers(self) -> None:
        with self._changed:
            if not self._follows:
                self._follows = True
                for peer, incarnation in sorted(self._present.items()):
                    self._inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))
            self._changed.notify_all()

    def await_peers(self, addresses: Collection[int], deadline: float) -> None:
        with self._changed:
            missing = sorted(set(addresses) - self._present.keys() - {self.address})
            before = dict(self._latest)
            while missing := [peer for peer in missing if self._latest.get(peer) == before.get(peer)]:
                self.check_open()
                if not self._sleep(deadline):
                    raise DeadlineError(
                        f"peers did not join in time (missing: {missing}); start them, or wait longer", tuple(missing)
                    )

    def start_receive(self, tag: Tags, source: Sources, into: Sequence[Tensor] | None) -> "Receive":
        ask = Ask(tag, source, into)
        with self._changed:
            self.check_open()
            ask.losses = {peer: self._gone[peer] for peer in self._gone.keys() & (ask.sources or ())}
            self._inbox.ask(ask)
        return Receive(self, ask)

    def withdraw(self, ask: Ask) -> None:
        with self._changed:
            self._inbox.withdraw(ask)
            self._changed.notify_all()

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float) -> int:
        asks = [_ask_of(receive) for receive in receives]
        if not asks:
            raise UsageError("there is nothing to wait for (receives: 0); give at least one")
        with self._changed:
            while True:
                done = [index for index, ask in enumerate(asks) if ask.message is not None]
                if done:
                    return min(done, key=lambda index: asks[index].number)
                self.check_open()
                if all(ask.is_vain for ask in asks):
                    raise explain_loss(asks[0])
                if not self._sleep(deadline):
                    raise explain_deadline(asks, self._present)

    def is_settled(self, ask: Ask) -> bool:
        with self._changed:
            return ask.message is not None or self._is_closed or ask.is_vain

    def _sleep(self, deadline: float) -> bool:
        """Wait for a change; False when the time is over. The condition is held."""
        remaining = deadline - self.clock.now()
        if remaining <= 0:
            return False
        self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
        return True


@final
class Receive(AbstractReceive):
    """An ask and the reception that it waits at."""

    def __init__(self, reception: Reception, ask: Ask) -> None:
        self._reception = reception
        self.ask = ask

    def wait(self, deadline: float = FOREVER) -> Message:
        if not self.ask.is_taken:
            self._reception.wait_any([self], deadline)
        return self.ask.take()

    def is_done(self) -> bool:
        return self.ask.is_taken or self._reception.is_settled(self.ask)

    def cancel(self) -> None:
        if not self.ask.is_taken:
            self._reception.withdraw(self.ask)


def _ask_of(receive: AbstractReceive) -> Ask:
    if not isinstance(receive, Receive):
        raise UsageError(f"receive is of another kind of mailbox ({type(receive).__name__}); use start_receive of this")
    return receive.ask
