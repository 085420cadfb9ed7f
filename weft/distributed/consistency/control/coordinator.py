"""The coordinator of ranks at their own pace: which training they are in, who is left, and what they add up.

Every server of a shard has one, and so has the responder of rank 0 where ranks gossip.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import final

from torch import Tensor

from weft.distributed.consistency.control.messages import MalformedError, Outgoing, read_int
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.errors import DeadlineError

__all__ = ["STOP", "SUM", "TOTAL", "Coordinator", "Sums", "WorkQueue", "find_missing"]

STOP, SUM, TOTAL = "stop", "sum", "total"
"""Tags that servers and gossiping ranks have in common."""

RETURN_SECONDS = 2.0
"""How long a server that was restored looks for the ranks."""


@final
class WorkQueue:
    """Deals out work to whoever asks next: piece i is share i mod N of global batch i div N."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self) -> int:
        piece, self._next = self._next, self._next + 1
        return piece

    def skip_to(self, piece: int) -> None:
        """Give out none before this one."""
        self._next = max(self._next, piece)


@final
class Sums:
    """Small sums over ranks, kept until all that are left have given their part.

    Numbered, so that a rank may be one sum ahead of another.
    """

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Tensor]] = {}  # number of the sum -> rank -> its part
        self.has_begun = False
        self._latest: dict[int, int] = {}  # rank -> the last sum that it gave a part of

    @property
    def is_waiting(self) -> bool:
        """Whether some have given a part of a sum, and others have not."""
        return any(self._parts.values())

    def add(self, number: int, rank: int, part: Tensor) -> None:
        """Raises MalformedError where the part does not fit those of other ranks."""
        parts = self._parts.setdefault(number, {})
        if any(known.shape != part.shape or known.dtype != part.dtype for known in parts.values()):
            raise MalformedError("tensors")
        self.has_begun = True
        parts[rank] = part
        self._latest[rank] = max(number, self._latest.get(rank, number))

    def take_whole(self, awaited: Collection[int]) -> Iterator[tuple[int, dict[int, Tensor]]]:
        """The number of each sum that is whole, and its parts in the order of ranks.

        A rank that is at a later sum had its total from a server that is lost since, and does not give its part again.
        """
        for number, parts in list(self._parts.items()):
            if parts and all(self._latest.get(rank, -1) >= number for rank in awaited):
                yield number, dict(sorted(parts.items()))
                del self._parts[number]


@final
class Coordinator:
    """Outlives trainings: a rank that is lost in one is not waited for in the next."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.ranks = ranks
        self.run = -1
        self.gone: set[int] = set()
        self.refused: Counter[str] = Counter()
        self.sums = Sums()
        self._gathers: set[int] = set()  # the numbers of sums of which all parts are wanted
        self._early: list[Message] = []

    @property
    def has_ranks(self) -> bool:
        """Whether any is left."""
        return len(self.gone) < len(self.ranks)

    def admit(self, message: Message, handle: Callable[[Message], None]) -> None:
        """Handle a message; one that is malformed is refused, and counted."""
        try:
            handle(message)
        except MalformedError:
            self.refused["malformed"] += 1

    def refusals(self, mailbox: AbstractMailbox) -> dict[str, int]:
        """Counts of messages that were refused here and by the mailbox, by reason."""
        return dict(sorted((self.refused + Counter(mailbox.refusals())).items()))

    def begin(self, run: int) -> list[Message]:
        """A training begins; what came for it before."""
        self.run, self.sums, self._gathers = run, Sums(), set()
        early, self._early = self._early, []
        return early

    def put_off(self, message: Message) -> None:
        """Of a training that rank 0 is yet to begin."""
        self._early.append(message)

    def add(self, message: Message) -> list[Outgoing]:
        """A rank's part of a sum, or, where it asks for all parts, of what is gathered; the answers, once all have
        come. Raises MalformedError."""
        if len(message.tensors) != 1:
            raise MalformedError("tensors")
        number = read_int(message.header, "number")
        self.sums.add(number, message.source, message.tensors[0])
        if message.header.get("gather") is True:
            self._gathers.add(number)
        return self._complete_sums()

    def lose(self, rank: int) -> list[Outgoing]:
        """A rank is gone; the answers that waited for it alone."""
        self.gone.add(rank)
        return self._complete_sums()

    def _complete_sums(self) -> list[Outgoing]:
        answers = []
        for number, parts in self.sums.take_whole(set(self.ranks) - self.gone):
            given = tuple(parts.values())
            # One after the other in the order of ranks: the same bits whatever came first.
            tensors = given if number in self._gathers else (sum(given[1:], given[0]),)
            answers += [Outgoing(rank, TOTAL, {"run": self.run, "number": number}, tensors) for rank in parts]
        return answers


def find_missing(mailbox: AbstractMailbox, ranks: Collection[int]) -> set[int]:
    """The ranks that died or ended before a server was restored: nobody will say that they leave."""
    with suppress(DeadlineError):
        mailbox.await_peers(ranks, mailbox.clock.now() + RETURN_SECONDS)
    return set(ranks) - mailbox.peers().keys()
