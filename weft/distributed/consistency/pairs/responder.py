"""A responder: what answers for a rank while its worker computes, in a thread or as a peer of its own.

It never waits for anybody, and only those who ask wait for it: no circle of waiting can close. That of rank 0 also
coordinates the run: who takes which work, when all stop, what they add up.
"""

import math
from collections import Counter
from typing import final

from weft.distributed.consistency.control import Coordinator, MalformedError, Outgoing, WorkQueue, read_int
from weft.distributed.consistency.pairs.events import Look, Pair
from weft.distributed.consistency.pairs.protocol import Tag
from weft.distributed.consistency.pairs.weights import Request, SharedWeights
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message

__all__ = ["WorkCoordinator", "respond"]


def respond(mailbox: AbstractMailbox, weights: SharedWeights, size: int, *, deals_work: bool = True) -> dict[str, int]:
    """Answer for a rank until its worker or rank 0 leaves; what was refused, by reason.

    Args:
        weights: of the rank, shared with its worker.
        size: how many ranks there are.
        deals_work: work goes to whoever asks; else every rank has its own share of every batch.
    """
    try:
        return _Responder(mailbox, weights, WorkCoordinator(size, deals_work=deals_work), size).serve()
    finally:
        weights.close()


@final
class WorkCoordinator:
    """Told of messages, answers with messages.

    Args:
        deals_work: work goes to whoever asks, and a fast rank takes more of it; else every rank has its own share of
            every batch. Then all stop after the same turn, for they wait for each other.
    """

    def __init__(self, size: int, *, deals_work: bool = True) -> None:
        self._coordinator = Coordinator(range(size))
        self._deals_work = deals_work
        self._first = 0
        self._work = WorkQueue()
        self._stops_after = math.inf  # this turn; -1 for at once
        self._last_turn: dict[int, int] = {}

    def take(self, message: Message) -> list[Outgoing]:
        """Raises MalformedError for what is no message of ours, or was here before."""
        run, coordinator = read_int(message.header, "run"), self._coordinator
        if message.tag == Tag.BEGIN and message.source == 0:
            return self._begin(run, read_int(message.header, "first"))
        if run > coordinator.run:
            coordinator.put_off(message)
            return []
        if run < coordinator.run:
            raise MalformedError("run")
        match message.tag:
            case Tag.DEAL:
                return [self._deal(message.source, read_int(message.header, "turn"))]
            case Tag.STOP:
                latest = -1 if self._deals_work else max(self._last_turn.values(), default=0)
                self._stops_after = min(self._stops_after, latest)
                return []
            case Tag.SUM:
                return coordinator.add(message)
            case _:
                raise MalformedError("tag")

    def lose(self, rank: int) -> list[Outgoing]:
        return self._coordinator.lose(rank)

    def _begin(self, run: int, first: int) -> list[Outgoing]:
        self._first, self._work, self._stops_after, self._last_turn = first, WorkQueue(first), math.inf, {}
        return [answer for message in self._coordinator.begin(run) for answer in self.take(message)]

    def _deal(self, rank: int, turn: int) -> Outgoing:
        if turn <= self._last_turn.get(rank, -1):
            raise MalformedError("turn")
        self._last_turn[rank] = turn
        size, run = len(self._coordinator.ranks), self._coordinator.run
        work = self._work.take() if self._deals_work else self._first + turn * size + rank
        return Outgoing(rank, Tag.WORK, {"run": run, "turn": turn, "work": work, "stop": turn > self._stops_after})


@final
class _Responder:
    def __init__(
        self, mailbox: AbstractMailbox, weights: SharedWeights, coordinator: WorkCoordinator, size: int
    ) -> None:
        self._mailbox = mailbox
        self._weights = weights
        self._size = size
        self._coordinator = coordinator if weights.rank == 0 else None
        self._last_turn: dict[int, tuple[int, int]] = {}  # of each rank that asked: run and turn
        self._refused: Counter[str] = Counter()

    def serve(self) -> dict[str, int]:
        self._mailbox.follow_peers()
        while True:
            message = self._mailbox.receive()
            if message.tag == LEFT and message.source in (0, self._weights.rank):
                return dict(self._refused + Counter({"malformed": self._weights.num_malformed}))
            for answer in self._handle(message):
                # Without waiting: a rank that is gone holds up nobody. What is sent is changed no more.
                self._mailbox.start_send(answer.to, answer.tag, answer.header, answer.tensors)

    def _handle(self, message: Message) -> list[Outgoing]:
        is_known = 0 <= message.source < self._size
        if message.tag == LEFT and is_known and self._coordinator is not None:
            return self._coordinator.lose(message.source)
        if message.tag in (JOINED, LEFT):
            return []
        if not is_known:
            self._refused["unknown rank"] += 1
            return []
        try:
            return self._answer(message)
        except MalformedError:
            self._refused["malformed"] += 1
            return []

    def _answer(self, message: Message) -> list[Outgoing]:
        match message.tag:
            case Tag.ASK:
                return self._weights.serve([self._pair(message)])
            case Tag.LOOK if message.source == 0:
                look = Look(read_int(message.header, "number"))
                return self._weights.serve([Request(message.source, read_int(message.header, "run"), look)])
            case Tag.FREE if message.source == self._weights.rank:
                return self._weights.serve()
            case _ if self._coordinator is not None:
                return self._coordinator.take(message)
            case _:
                raise MalformedError("tag")

    def _pair(self, message: Message) -> Request:
        """Each turn of a rank comes once, and in order."""
        run, turn = read_int(message.header, "run"), read_int(message.header, "turn")
        if (run, turn) <= self._last_turn.get(message.source, (-1, -1)):
            raise MalformedError("turn")
        self._last_turn[message.source] = (run, turn)
        return Request(message.source, run, Pair(message.source, turn), message.tensors)
