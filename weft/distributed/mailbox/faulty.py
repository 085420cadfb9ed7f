"""A mailbox that fails on purpose, at a given peer and message: delays, losses, doubles, deaths, slow links."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar, final

from torch import Tensor

from weft.distributed.group.faulty import Delay, Drop, Fault, Kill, SlowClock, SlowLink, SlowRank
from weft.distributed.group.group import AbstractWork, DoneWork
from weft.distributed.mailbox.mailbox import FOREVER, AbstractMailbox, Header, Message
from weft.distributed.mailbox.wrapper import AbstractWrapper
from weft.errors import DeadlineError

__all__ = ["Duplicate", "FaultyMailbox", "MailFault"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class Duplicate:
    """The peer sends these messages twice, counted from 0."""

    rank: int
    first_call: int = 0
    num_calls: int = 1


MailFault = Fault | Duplicate
"""The faults of a group, where a call is a message that is sent, and one that only messages can have."""


@final
class FaultyMailbox(AbstractWrapper):
    """Wraps any mailbox and applies the faults of its own address. `die` ends the peer, as its kind does.

    Messages are counted as they are sent, from 0. A Kill `after_seconds` also meets a peer that waits. Time passes on
    the mailbox's clock, so the same faults work in real and in virtual time.
    """

    def __init__(self, inner: AbstractMailbox, faults: Sequence[MailFault], *, die: Callable[[], NoReturn]) -> None:
        self._faults = tuple(fault for fault in faults if fault.rank == inner.address)
        slow = [fault.factor for fault in self._faults if isinstance(fault, SlowRank)]
        super().__init__(inner, clock=SlowClock(inner.clock, max(slow)) if slow else None)
        self._die = die
        self._num_sends = 0
        ends = [fault.after_seconds for fault in self._faults if isinstance(fault, Kill)]
        self._dies_at = inner.clock.now() + min((end for end in ends if end is not None), default=FOREVER)

    def start_send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> AbstractWork:
        met = self._meet_faults(to, sum(tensor.nbytes for tensor in tensors))
        if any(isinstance(fault, Drop) for fault in met):
            return DoneWork()
        if any(isinstance(fault, Duplicate) for fault in met):
            self._inner.start_send(to, tag, header, tensors).wait()
        return self._inner.start_send(to, tag, header, tensors)

    def wait_inside(self, wait: Callable[[float], Result], deadline: float) -> Result:
        """Wait, unless death comes before the deadline."""
        try:
            return wait(min(deadline, self._dies_at))
        except DeadlineError:
            if self._inner.clock.now() >= self._dies_at:
                self._die()
            raise

    def on_received(self, message: Message) -> None:
        pass

    def _meet_faults(self, to: int, num_bytes: int) -> list[MailFault]:
        """Wait or die as this message's faults ask; those that concern the message itself."""
        index = self._num_sends
        self._num_sends += 1
        late = 0.0
        met: list[MailFault] = []
        for fault in self._faults:
            match fault:
                case Kill():
                    if fault.at_call == index or self._inner.clock.now() >= self._dies_at:
                        self._die()
                case SlowLink():
                    late += fault.seconds + fault.seconds_per_byte * num_bytes if fault.peer == to else 0.0
                case SlowRank():
                    pass
                case _ if fault.first_call <= index < fault.first_call + fault.num_calls:
                    late += fault.seconds if isinstance(fault, Delay) else 0.0
                    met.append(fault)
        if late:
            self._inner.clock.wait_until(self._inner.clock.now() + late)
        return met
