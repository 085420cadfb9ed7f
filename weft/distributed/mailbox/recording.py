"""A mailbox that counts what passes through it: messages and bytes per peer and tag."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.mailbox import JOINED, LEFT, AbstractMailbox, Header, Message
from weft.distributed.mailbox.payload import encode_header
from weft.distributed.mailbox.wrapper import AbstractWrapper

__all__ = ["MailTraffic", "MessageCount", "RecordingMailbox"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MessageCount:
    """`num_bytes` are those of the tensors; headers, in JSON, are counted apart."""

    num_messages: int = 0
    num_bytes: int = 0
    header_bytes: int = 0

    def __add__(self, other: "MessageCount") -> "MessageCount":
        return MessageCount(
            self.num_messages + other.num_messages,
            self.num_bytes + other.num_bytes,
            self.header_bytes + other.header_bytes,
        )


Counts = dict[tuple[int, str], MessageCount]
"""By peer and tag."""


@dataclass(frozen=True, slots=True)
class MailTraffic:
    """Messages sent to and received from each peer under each tag, without notifications of who joins and leaves."""

    sent: Counts
    received: Counts

    def sent_under(self, tag: str) -> MessageCount:
        """To all peers together."""
        return sum((count for (_, its_tag), count in self.sent.items() if its_tag == tag), MessageCount())


@final
class RecordingMailbox(AbstractWrapper):
    """Wraps any mailbox and changes nothing but its own counts.

    A message counts as sent when it is started, and as received when it is handed to whoever asked for it.
    """

    def __init__(self, inner: AbstractMailbox) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._sent: Counts = {}
        self._received: Counts = {}

    @property
    def traffic(self) -> MailTraffic:
        """The counts so far."""
        with self._lock:
            return MailTraffic(dict(self._sent), dict(self._received))

    def start_send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> AbstractWork:
        work = self._inner.start_send(to, tag, header, tensors)
        self._count(self._sent, to, tag, header, tensors)
        return work

    def wait_inside(self, wait: Callable[[float], Result], deadline: float) -> Result:
        return wait(deadline)

    def on_received(self, message: Message) -> None:
        if message.tag not in (JOINED, LEFT):
            self._count(self._received, message.source, message.tag, message.header, message.tensors)

    def _count(
        self, counts: Counts, peer: int, tag: str, header: Mapping[str, Any] | None, tensors: Sequence[Tensor]
    ) -> None:
        count = MessageCount(1, sum(tensor.nbytes for tensor in tensors), len(encode_header(header)))
        with self._lock:
            counts[peer, tag] = counts.get((peer, tag), MessageCount()) + count
