"""What the mailboxes of one virtual cluster share: who is there, what is under way, who must be woken."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from weft.distributed.mailbox.inbox import Ask, Inbox
from weft.distributed.mailbox.mailbox import JOINED, LEFT, Message
from weft.distributed.mailbox.window import ChunkedWindow
from weft.distributed.virtual import AbstractTransport, AbstractWait, TraceEvent, VirtualNetwork
from weft.errors import UsageError

__all__ = ["MailRoom", "MailWait", "Pigeonhole"]


@final
class MailWait(AbstractWait):
    """A rank that waits for one of these asks, for these peers, or until something else is so."""

    def __init__(self, asks: Sequence[Ask] = (), peers: frozenset[int] = frozenset()) -> None:
        self.asks = asks
        self.peers = peers

    def awaited(self) -> list[int]:
        return []  # a mailbox's peers are lost when they die, never because they say nothing

    def is_hopeless(self) -> bool:
        return False  # the room itself wakes those who wait for a peer that has gone

    def tell(self) -> str:
        for ask in self.asks[:1]:
            return f"waits for a message ({ask.describe(())[0]})"
        return f"waits for peer {', '.join(map(str, sorted(self.peers)))} to join or to expose a window"


@final
class Pigeonhole:
    """One peer's side of the room."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.inbox = Inbox()
        self.refused: Counter[str] = Counter()
        self.last_arrival: dict[int, float] = {}  # by target: when the last message that was sent there arrives
        self.follows = False


@final
class MailRoom(AbstractTransport):
    """Time passes and ranks change only through the scheduler, so nothing here needs a lock."""

    def __init__(self, office: VirtualNetwork) -> None:
        self.office = office
        self.scheduler = office.scheduler
        self.holes: dict[int, Pigeonhole] = {}
        self.windows: dict[tuple[int, str], ChunkedWindow] = {}
        self.gone: dict[int, tuple[str, dict[int, float]]] = {}  # why, and when its last messages arrive where
        self.num_joined = 0
        self.latest: dict[int, int] = {}  # incarnation, also of those who have gone
        self._later: dict[int, int] = {}  # incarnation -> that of the same rank's next life

    def join(self, rank: int) -> Pigeonhole:
        if rank in self.holes:
            raise UsageError(f"address is taken (address: {rank}); close its mailbox before")
        hole = self.holes[rank] = Pigeonhole(self.num_joined)
        if rank in self.latest:
            self._later[self.latest[rank]] = self.num_joined
        self.latest[rank] = self.num_joined
        self.num_joined += 1
        _, last_arrival = self.gone.pop(rank, ("", {}))
        hole.last_arrival.update(last_arrival)  # news of this life's end may not overtake the messages of the last one
        note = Message(rank, JOINED, {}, incarnation=hole.incarnation)
        for other in self.followers(rank):
            # After the last message of the life before, and the note that it has ended.
            moment = max(self.scheduler.now, last_arrival.get(other, 0.0))
            self.scheduler.at(moment, other, partial(self.deliver, other, self.holes[other].incarnation, note))
        self.wake(lambda wait: rank in wait.peers)
        return hole

    def leave(self, rank: int, reason: str) -> None:
        """Each of the others learns that it has left after its last message there."""
        hole = self.holes.pop(rank, None)
        if hole is None:
            return
        self.gone[rank] = (reason, hole.last_arrival)
        self.windows = {key: window for key, window in self.windows.items() if key[0] != rank}
        note = Message(rank, LEFT, {"reason": reason}, incarnation=hole.incarnation)
        for other, its in self.holes.items():
            last = hole.last_arrival.get(other, 0.0)
            if last > self.scheduler.now:
                self.scheduler.at(last, other, partial(self._tell_left, other, its.incarnation, note))
            elif its.follows or its.inbox.has_asks:
                self._tell_left(other, its.incarnation, note)
        self.wake(lambda wait: rank in wait.peers)

    def lose(self, rank: int, reason: str) -> None:
        self.leave(rank, reason)

    def end(self, rank: int) -> None:
        self.leave(rank, "it ended")

    def followers(self, rank: int) -> list[int]:
        return [other for other, hole in self.holes.items() if hole.follows and other != rank]

    def send(self, source: int, to: int, num_bytes: int, message: Message) -> float:
        """Put a message on its way; returns when its last byte has left."""
        sent, received = self.office.book(source, to, num_bytes)
        self.holes[source].last_arrival[to] = received
        incarnation = self.holes[to].incarnation
        self.scheduler.at(received, to, partial(self.deliver, to, incarnation, message))
        if self.office.trace is not None:
            began = self.scheduler.now
            self.office.trace.append(TraceEvent(source, began, received, f"send {message.tag}", "network"))
        return sent

    def deliver(self, to: int, incarnation: int, message: Message) -> None:
        """A message has arrived; one for an earlier life of the peer is refused."""
        hole = self.holes.get(to)
        if hole is None:
            return
        if hole.incarnation != incarnation:
            hole.refused["late"] += 1
            return
        ask = hole.inbox.deliver(message)
        wait = self.office.waits.get(to)
        if ask is not None and isinstance(wait, MailWait) and ask in wait.asks:
            self.scheduler.resume(to)

    def _tell_left(self, to: int, incarnation: int, note: Message) -> None:
        hole = self.holes.get(to)
        if hole is None or hole.incarnation != incarnation:
            return
        vain = hole.inbox.lose(note.source, note.header["reason"], self._later.get(note.incarnation))
        wait = self.office.waits.get(to)
        if isinstance(wait, MailWait) and any(ask in wait.asks for ask in vain):
            self.scheduler.resume(to)
        if hole.follows:
            self.deliver(to, incarnation, note)

    def losses(self, rank: int, ask: Ask) -> dict[int, str]:
        """Those of the ask's sources that have gone, with nothing of theirs on its way to the rank."""
        gone = {source: self.gone[source] for source in self.gone.keys() & (ask.sources or ())}
        now = self.scheduler.now
        return {source: reason for source, (reason, last) in gone.items() if last.get(rank, 0.0) <= now}

    def reasons(self) -> dict[int, str]:
        return {rank: reason for rank, (reason, _) in self.gone.items()}

    def wake(self, concerns: Callable[[MailWait], bool]) -> None:
        for rank, wait in self.office.waits.items():
            if isinstance(wait, MailWait) and concerns(wait):
                self.scheduler.resume(rank)

    def wait(self, rank: int, wait: MailWait, is_over: Callable[[], bool], deadline: float) -> bool:
        """Park the rank until `is_over`; False when the deadline came first."""
        self.scheduler.check()
        if deadline != float("inf") and deadline > self.scheduler.now and not is_over():
            self.scheduler.at(deadline, rank, partial(self._expire, rank, wait))
        while not is_over():
            if self.scheduler.now >= deadline:
                return False
            self.office.park(rank, wait)
        return True

    def _expire(self, rank: int, wait: MailWait) -> None:
        if self.office.waits.get(rank) is wait:
            self.scheduler.resume(rank)
