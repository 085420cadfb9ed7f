"""A mailbox around another one: everything is passed on, and a wrapper adds to sending, waiting and receiving."""

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import TypeVar, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.mailbox.mailbox import FOREVER, AbstractMailbox, AbstractReceive, Into, Message, Sources, Tags

__all__ = ["AbstractWrapper"]

Result = TypeVar("Result")


class AbstractWrapper(AbstractMailbox):
    """Passes every call on to `inner`. A wrapper says what happens in `start_send` and in the two calls below."""

    def __init__(self, inner: AbstractMailbox, *, clock: AbstractClock | None = None) -> None:
        self._inner = inner
        self.address, self.incarnation, self.clock = inner.address, inner.incarnation, clock or inner.clock

    @abstractmethod
    def wait_inside(self, wait: Callable[[float], Result], deadline: float) -> Result:
        """Carry out one wait of the inner mailbox, until the deadline."""

    @abstractmethod
    def on_received(self, message: Message) -> None:
        """A message is handed out, for the first time."""

    @final
    def start_receive(self, tag: Tags = None, source: Sources = None, *, into: Into = None) -> AbstractReceive:
        return _WrappedReceive(self, self._inner.start_receive(tag, source, into=into))

    @final
    def peers(self) -> dict[int, int]:
        return self._inner.peers()

    @final
    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self.wait_inside(lambda until: self._inner.await_peers(addresses, until), deadline)

    @final
    def follow_peers(self) -> None:
        self._inner.follow_peers()

    @final
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    @final
    def refusals(self) -> dict[str, int]:
        return self._inner.refusals()

    @final
    def close(self) -> None:
        self._inner.close()


@final
class _WrappedReceive(AbstractReceive):
    def __init__(self, mailbox: AbstractWrapper, inner: AbstractReceive) -> None:
        self._inner = inner
        self._mailbox = mailbox
        self._is_received = False

    def wait(self, deadline: float = FOREVER) -> Message:
        message = self._mailbox.wait_inside(self._inner.wait, deadline)
        if not self._is_received:
            self._is_received = True
            self._mailbox.on_received(message)
        return message

    def is_done(self) -> bool:
        return self._inner.is_done()

    def cancel(self) -> None:
        self._inner.cancel()
