"""A desk: what answers for a rank while its worker computes, in a thread or as a peer of its own.

It never waits for anybody, and only those who ask wait for it: no circle of waiting can close.
"""

from collections import Counter
from typing import final

from weft.distributed.consistency.pairs.books import Books
from weft.distributed.consistency.pairs.events import Look, Pair
from weft.distributed.consistency.pairs.protocol import Letter, Tag
from weft.distributed.consistency.pairs.slot import Request, Slot
from weft.distributed.consistency.server.protocol import MalformedError, read_int
from weft.distributed.mailbox import JOINED, LEFT, AbstractMailbox, Message

__all__ = ["keep_desk"]


def keep_desk(mailbox: AbstractMailbox, slot: Slot, size: int, *, deals_work: bool = True) -> dict[str, int]:
    """Answer for a rank until its worker or rank 0 leaves; what was refused, by reason."""
    try:
        return _Desk(mailbox, slot, Books(size, deals_work=deals_work), size).keep()
    finally:
        slot.close()


@final
class _Desk:
    def __init__(self, mailbox: AbstractMailbox, slot: Slot, books: Books, size: int) -> None:
        self._mailbox = mailbox
        self._slot = slot
        self._size = size
        self._books = books if slot.rank == 0 else None
        self._last_turn: dict[int, tuple[int, int]] = {}  # of each rank that asked: run and turn
        self._refused: Counter[str] = Counter()

    def keep(self) -> dict[str, int]:
        self._mailbox.follow_peers()
        while True:
            message = self._mailbox.receive()
            if message.tag == LEFT and message.source in (0, self._slot.rank):
                return dict(self._refused + Counter({"malformed": self._slot.num_malformed}))
            for letter in self._handle(message):
                # Without waiting: a rank that is gone holds up nobody. What is sent is changed no more.
                self._mailbox.start_send(letter.to, letter.tag, letter.header, letter.tensors)

    def _handle(self, message: Message) -> list[Letter]:
        is_known = 0 <= message.source < self._size
        if message.tag == LEFT and is_known and self._books is not None:
            return self._books.lose(message.source)
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

    def _answer(self, message: Message) -> list[Letter]:
        match message.tag:
            case Tag.ASK:
                return self._slot.serve([self._pair(message)])
            case Tag.LOOK if message.source == 0:
                look = Look(read_int(message.header, "number"))
                return self._slot.serve([Request(message.source, read_int(message.header, "run"), look)])
            case Tag.FREE if message.source == self._slot.rank:
                return self._slot.serve()
            case _ if self._books is not None:
                return self._books.take(message)
            case _:
                raise MalformedError("tag")

    def _pair(self, message: Message) -> Request:
        """Each turn of a rank comes once, and in order."""
        run, turn = read_int(message.header, "run"), read_int(message.header, "turn")
        if (run, turn) <= self._last_turn.get(message.source, (-1, -1)):
            raise MalformedError("turn")
        self._last_turn[message.source] = (run, turn)
        return Request(message.source, run, Pair(message.source, turn), message.tensors)
