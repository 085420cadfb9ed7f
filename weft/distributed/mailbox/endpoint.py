"""The part of a mailbox that all kinds share: checks, messages to itself, and a receiver."""

import threading
from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import final

from torch import Tensor

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
from weft.distributed.mailbox.payload import check_tag, decode_json, encode_header, prepare_tensors
from weft.distributed.mailbox.receiver import Receiver
from weft.errors import PeerLostError

__all__ = ["AbstractEndpoint", "SendWork", "lost_send"]


@final
class SendWork(AbstractWork):
    """Holds its tensors until they may be changed again."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors: Sequence[Tensor] | None = tensors
        self._ended = threading.Event()
        self._error: PeerLostError | None = None

    def end(self, error: PeerLostError | None = None) -> None:
        self._error, self._tensors = error, None
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise PeerLostError(str(self._error), self._error.peer)

    def is_done(self) -> bool:
        return self._ended.is_set()


def lost_send(error: PeerLostError) -> SendWork:
    """A send to a peer that is not there: ended, with this error."""
    work = SendWork()
    work.end(error)
    return work


class AbstractEndpoint(AbstractMailbox):
    """A mailbox with a receiver of its own; a kind adds how messages travel."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self.address, self.incarnation, self.clock = receiver.address, receiver.incarnation, receiver.clock

    @abstractmethod
    def _transmit(self, to: int, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        """Send to another peer. Header and tensors are checked, encoded and contiguous."""

    @final
    def _copy_message(self, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> Message:
        """A message of this peer that shares nothing with what it was made of."""
        copies = tuple(tensor.clone() for tensor in tensors)
        return Message(self.address, tag, decode_json(header), copies, self.incarnation)

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
