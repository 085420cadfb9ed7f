"""The part of a mailbox that all kinds share: checks, messages to itself, and a receiver."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import final

from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractWork, DoneWork
from weft.distributed.mailbox.mailbox import (
    FOREVER,
    AbstractMailbox,
    AbstractReceive,
    Header,
    Into,
    Message,
    Sources,
    Tags,
)
from weft.distributed.mailbox.payload import check_tag, decode_header, encode_header, prepare_tensors
from weft.distributed.mailbox.receiver import Receiver

__all__ = ["AbstractEndpoint"]


class AbstractEndpoint(AbstractMailbox):
    """A mailbox with a receiver of its own; a kind adds how messages travel."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    @abstractmethod
    def _transmit(self, to: int, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        """Send to another peer. Header and tensors are checked, encoded and contiguous."""

    @final
    def _copy_message(self, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> Message:
        """A message of this peer that shares nothing with what it was made of."""
        copies = tuple(tensor.clone() for tensor in tensors)
        return Message(self.address, tag, decode_header(header), copies, self.incarnation)

    @property
    @final
    def address(self) -> int:
        return self._receiver.address

    @property
    @final
    def incarnation(self) -> int:
        return self._receiver.incarnation

    @property
    @final
    def clock(self) -> AbstractClock:
        return self._receiver.clock

    @final
    def start_send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> AbstractWork:
        self._receiver.check_open()
        check_tag(tag)
        encoded, contiguous = encode_header(header), prepare_tensors(tensors)
        if to != self.address:
            return self._transmit(to, tag, encoded, contiguous)
        self._receiver.deliver(self._copy_message(tag, encoded, contiguous))
        return DoneWork()

    @final
    def start_receive(self, tag: Tags = None, source: Sources = None, *, into: Into = None) -> AbstractReceive:
        return self._receiver.start_receive(tag, source, into)

    @final
    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float = FOREVER) -> int:
        return self._receiver.wait_any(receives, deadline)

    @final
    def peers(self) -> dict[int, int]:
        return self._receiver.peers()

    @final
    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._receiver.await_peers(addresses, deadline)

    @final
    def follow_peers(self) -> None:
        self._receiver.follow_peers()

    @final
    def refusals(self) -> dict[str, int]:
        return self._receiver.refusals()
