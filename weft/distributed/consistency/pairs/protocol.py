"""The messages of ranks that gossip over the mailbox, and how a worker sends and receives them.

worker of rank a                responder of rank p                 responder of rank 0, which coordinates
ask    turn, its weights   -->
                           <--  paired   the mean of the two
look   rank 0 evaluates    -->
                           <--  view     a copy of the weights
free   its own: go on      -->
                           <--  go       its own: your update is next (a replay)
deal   wants work          ----------------------------------->
                           <-----------------------------------     work    which piece, whether to stop
begin, stop, sum           ----------------------------------->
                           <-----------------------------------     total   when all who are left have given theirs
start    weights of rank 0, from worker to worker
weights  turn, a neighbour's, from worker to worker, where a rank meets all; none from one that has left
"""

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, final

from torch import Tensor

from weft.distributed.consistency.control import STOP, SUM, TOTAL
from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.errors import PeerLostError

__all__ = ["RunMailbox", "Tag", "responder_address"]


class Tag(StrEnum):
    """The kind of a message."""

    START = "start"
    WEIGHTS = "weights"
    ASK = "ask"
    PAIRED = "paired"
    LOOK = "look"
    VIEW = "view"
    FREE = "free"
    GO = "go"
    BEGIN = "begin"
    DEAL = "deal"
    WORK = "work"
    STOP = STOP
    SUM = SUM
    TOTAL = TOTAL


def responder_address(size: int, rank: int) -> int:
    """Workers have the addresses of their ranks; responders come after them."""
    return size + rank


@final
class RunMailbox:
    """A worker's mailbox in a run: every message has the number of the training, and answers have a deadline.

    Args:
        patience: seconds to wait for an answer. A peer that dies or falls silent is noticed long before by the mailbox;
            this is for what must not happen.
    """

    def __init__(self, mailbox: AbstractMailbox, size: int, patience: float) -> None:
        self.mailbox = mailbox
        self.size = size
        self.run = -1
        self._patience = patience
        self._under_way: list[AbstractWork] = []

    @property
    def rank(self) -> int:
        return self.mailbox.address

    @property
    def deadline(self) -> float:
        return self.mailbox.clock.now() + self._patience

    def alive(self) -> list[int]:
        """Ranks whose worker and responder are there."""
        peers = self.mailbox.peers()
        others = [rank for rank in peers if rank < self.size and responder_address(self.size, rank) in peers]
        return sorted([self.rank, *others])

    def send(self, to: int, tag: Tag, tensors: Sequence[Tensor], **header: Any) -> int:
        """To a worker or a responder, by its address; `settle` before the tensors change. How many bytes they are."""
        self._under_way.append(self.mailbox.start_send(to, tag, {"run": self.run, **header}, tensors))
        return sum(tensor.nbytes for tensor in tensors)

    def note(self, rank: int, tag: Tag, **header: Any) -> None:
        """To the responder of a rank; to one that is gone it is lost."""
        self.mailbox.start_send(responder_address(self.size, rank), tag, {"run": self.run, **header})

    def receive(self, tag: Tag, source: int, **expected: int) -> Message:
        """The answer with these numbers; others of the kind were here before, and come twice."""
        deadline = self.deadline
        while True:
            message = self.mailbox.receive(tag, source, deadline=deadline)
            if message.header.items() >= {"run": self.run, **expected}.items():
                return message

    def receive_answer(self, tag: Tag, rank: int, **expected: int) -> Message:
        """Of the responder of a rank."""
        return self.receive(tag, responder_address(self.size, rank), **expected)

    def settle(self) -> None:
        """Wait until what was sent may be changed."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            with suppress(PeerLostError):
                work.wait()
