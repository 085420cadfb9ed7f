"""Which message goes to whom: what has arrived and what is asked for, matched in order. No thread, no clock.

    arrived, by number   1: push from 2   2: pull from 1   3: push from 1
    asked for, in order  (pull, from anyone) -> 2      (anything, from 1) -> 3

An ask that begins takes the first arrival that fits; an arrival goes to the first ask that fits.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.distributed.mailbox.mailbox import JOINED, LEFT, Message, Sources, Tags
from weft.distributed.mailbox.payload import fill
from weft.errors import UsageError

__all__ = ["Ask", "Inbox"]


@final
class Ask:
    """One message that is asked for. `number` is its place among the arrivals, once it has come."""

    __slots__ = (
        "_result",
        "born",
        "evacuate",
        "into",
        "is_claimed",
        "is_in_place",
        "losses",
        "message",
        "number",
        "sources",
        "tags",
    )

    def __init__(self, tag: Tags, source: Sources, into: Sequence[Tensor] | None) -> None:
        self.tags = None if tag is None else frozenset((tag,)) if isinstance(tag, str) else frozenset(tag)
        self.sources = (
            None if source is None else frozenset((source,)) if isinstance(source, int) else frozenset(source)
        )
        self.into = None if into is None else tuple(into)
        self.message: Message | None = None
        self.number = 0
        self.is_claimed = False  # its message is on the way in, and nothing else may be given to it
        self.evacuate: Callable[[], None] | None = None  # moves what has come of that message out of `into`
        self.is_in_place = False  # the message's tensors are those of `into`
        self.losses: dict[int, str] = {}  # sources that have gone since it was asked, and why
        self.born = 0  # how many lives of peers had begun when it was asked; counted where news is slower than peers
        self._result: Message | None = None
        if frozenset() in (self.tags, self.sources):
            raise UsageError("a receive asks for nothing (no tag or no source); name at least one, or None for all")

    def wants(self, source: int, tag: str) -> bool:
        return (self.sources is None or source in self.sources) and (self.tags is None or tag in self.tags)

    @property
    def is_vain(self) -> bool:
        """Whether nothing can come any more. A source that comes back does not know what was asked before, but that
        it comes back may be just what is asked for."""
        if self.sources is None or self.is_claimed or (self.tags is not None and JOINED in self.tags):
            return False
        return self.sources <= self.losses.keys()

    @property
    def is_taken(self) -> bool:
        return self._result is not None

    def take(self) -> Message:
        """The message, its tensors where they were asked to be; the same again when asked again."""
        if self._result is None:
            assert self.message is not None, "the message has come"
            is_note = self.message.tag in (JOINED, LEFT)
            if self.into is None or self.is_in_place or is_note:
                self._result = self.message
            else:
                self._result = replace(self.message, tensors=fill(self.into, self.message.tensors))
        return self._result

    def describe(self, peers: Collection[int]) -> tuple[str, tuple[int, ...]]:
        """What is waited for in words, and from whom; `peers` are those who are there."""
        awaited = tuple(sorted(peers if self.sources is None else self.sources))
        tags = "any tag" if self.tags is None else f"tag: {', '.join(sorted(self.tags))}"
        names = ", ".join(map(str, awaited)) or "anyone"
        return f"{tags}, waited for: {names}", awaited


@final
class Inbox:
    """The arrivals that nobody has asked for yet, and the asks that nothing has come for yet."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, Message]] = deque()
        self._asks: list[Ask] = []
        self._num_arrivals = 0

    @property
    def has_asks(self) -> bool:
        return bool(self._asks)

    def ask(self, ask: Ask) -> None:
        for index, (number, message) in enumerate(self._arrived):
            if ask.wants(message.source, message.tag):
                del self._arrived[index]
                _settle(ask, number, message)
                return
        self._asks.append(ask)

    def deliver(self, message: Message) -> Ask | None:
        """Give an arrival to the first ask that fits, or keep it; returns the ask."""
        self._num_arrivals += 1
        return self._hand_out(self._num_arrivals, message)

    def lose(self, source: int, reason: str, later_life: int | None = None) -> list[Ask]:
        """A source has gone, and all of its messages are in; returns the asks that are vain now.

        Where its later life has begun already, what was asked since is asked of that one.
        """
        concerned = [ask for ask in self._asks if ask.sources is not None and source in ask.sources]
        if later_life is not None:
            concerned = [ask for ask in concerned if ask.born <= later_life]
        for ask in concerned:
            ask.losses[source] = reason
        return [ask for ask in concerned if ask.is_vain]

    def find(self, source: int, tag: str) -> Ask | None:
        """The ask that a message would go to now."""
        return next((ask for ask in self._asks if not ask.is_claimed and ask.wants(source, tag)), None)

    def settle(self, ask: Ask, message: Message) -> None:
        """The message that claimed the ask is there, its tensors in place."""
        self._num_arrivals += 1
        self._asks.remove(ask)
        ask.is_in_place = True
        _settle(ask, self._num_arrivals, message)

    def release(self, ask: Ask) -> None:
        """The message that claimed the ask will not come."""
        self._asks.remove(ask)
        ask.is_claimed, ask.evacuate = False, None
        self.ask(ask)

    def withdraw(self, ask: Ask) -> None:
        """Forget an ask; a message that came for it and was not taken goes to the next that wants it."""
        if ask in self._asks:
            self._asks.remove(ask)
            if ask.evacuate is not None:
                ask.evacuate()
        elif ask.message is not None and not ask.is_taken:
            message, ask.message = ask.message, None
            if ask.is_in_place:
                message = replace(message, tensors=tuple(tensor.clone() for tensor in message.tensors))
            self._hand_out(ask.number, message)

    def _hand_out(self, number: int, message: Message) -> Ask | None:
        for ask in self._asks:
            if not ask.is_claimed and ask.wants(message.source, message.tag):
                self._asks.remove(ask)
                _settle(ask, number, message)
                return ask
        at = len(self._arrived)
        while at and self._arrived[at - 1][0] > number:
            at -= 1
        self._arrived.insert(at, (number, message))
        return None


def _settle(ask: Ask, number: int, message: Message) -> None:
    ask.number, ask.message = number, message
