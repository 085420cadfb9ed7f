"""A mailbox that counts what passes through it: messages and bytes per peer and tag."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.mailbox import (
    FOREVER,
    JOINED,
    LEFT,
    AbstractMailbox,
    AbstractReceive,
    Message,
    Sources,
    Tags,
)
from weft.distributed.mailbox.payload import encode_header
from weft.distributed.mailbox.window import AbstractWindow

__all__ = ["MailTraffic", "RecordingMailbox", "Tally"]

Key = tuple[int, str]
"""Peer and tag; windows count as `window NAME`."""


@dataclass(frozen=True, slots=True)
class Tally:
    """`num_bytes` are those of the tensors; headers, in JSON, are counted apart."""

    num_messages: int = 0
    num_bytes: int = 0
    header_bytes: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.num_messages + other.num_messages,
            self.num_bytes + other.num_bytes,
            self.header_bytes + other.header_bytes,
        )


@dataclass(frozen=True, slots=True)
class MailTraffic:
    """What has been sent to whom and received from whom, by (peer, tag); notes of who comes and goes are left out."""

    sent: dict[Key, Tally]
    received: dict[Key, Tally]

    def sent_under(self, tag: str) -> Tally:
        """To all peers together."""
        return sum((tally for (_, its_tag), tally in self.sent.items() if its_tag == tag), Tally())

    def received_under(self, tag: str) -> Tally:
        """From all peers together."""
        return sum((tally for (_, its_tag), tally in self.received.items() if its_tag == tag), Tally())


@final
class RecordingMailbox(AbstractMailbox):
    """Wraps any mailbox and changes nothing but its own counts.

    A message counts as sent when it is started, and as received when it is handed to whoever asked for it.
    """

    def __init__(self, inner: AbstractMailbox) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._sent: dict[Key, Tally] = {}
        self._received: dict[Key, Tally] = {}

    @property
    def traffic(self) -> MailTraffic:
        """What has passed so far."""
        with self._lock:
            return MailTraffic(dict(self._sent), dict(self._received))

    @property
    def address(self) -> int:
        return self._inner.address

    @property
    def incarnation(self) -> int:
        return self._inner.incarnation

    @property
    def clock(self) -> AbstractClock:
        return self._inner.clock

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        work = self._inner.start_send(to, tag, header, tensors)
        self.count_sent(to, tag, Tally(1, sum(tensor.nbytes for tensor in tensors), len(encode_header(header))))
        return work

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return _RecordingReceive(self, self._inner.start_receive(tag, source, into=into))

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float = FOREVER) -> int:
        inner = [receive.inner if isinstance(receive, _RecordingReceive) else receive for receive in receives]
        return self._inner.wait_any(inner, deadline)

    def peers(self) -> dict[int, int]:
        return self._inner.peers()

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._inner.await_peers(addresses, deadline)

    def follow_peers(self) -> None:
        self._inner.follow_peers()

    def expose(self, name: str, tensor: Tensor) -> Tensor:
        return self._inner.expose(name, tensor)

    def window(self, peer: int, name: str, deadline: float = FOREVER) -> AbstractWindow:
        return _RecordingWindow(self, self._inner.window(peer, name, deadline), (peer, f"window {name}"))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def refusals(self) -> dict[str, int]:
        return self._inner.refusals()

    def close(self) -> None:
        self._inner.close()

    def count_sent(self, peer: int, tag: str, tally: Tally) -> None:
        with self._lock:
            self._sent[peer, tag] = self._sent.get((peer, tag), Tally()) + tally

    def count_received(self, peer: int, tag: str, tally: Tally) -> None:
        with self._lock:
            self._received[peer, tag] = self._received.get((peer, tag), Tally()) + tally


@final
class _RecordingReceive(AbstractReceive):
    """Counts its message once."""

    def __init__(self, mailbox: RecordingMailbox, inner: AbstractReceive) -> None:
        self.inner = inner
        self._mailbox = mailbox
        self._is_counted = False

    def wait(self, deadline: float = FOREVER) -> Message:
        message = self.inner.wait(deadline)
        if not self._is_counted and message.tag not in (JOINED, LEFT):
            self._is_counted = True
            num_bytes = sum(tensor.nbytes for tensor in message.tensors)
            tally = Tally(1, num_bytes, len(encode_header(message.header)))
            self._mailbox.count_received(message.source, message.tag, tally)
        return message

    def is_done(self) -> bool:
        return self.inner.is_done()

    def cancel(self) -> None:
        self.inner.cancel()


@final
class _RecordingWindow(AbstractWindow):
    def __init__(self, mailbox: RecordingMailbox, inner: AbstractWindow, key: Key) -> None:
        self._mailbox = mailbox
        self._inner = inner
        self._key = key

    @property
    def shape(self) -> tuple[int, ...]:
        return self._inner.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    def get(self, out: Tensor, offset: int = 0) -> None:
        self._inner.get(out, offset)
        self._mailbox.count_received(*self._key, Tally(1, out.nbytes))

    def put(self, tensor: Tensor, offset: int = 0) -> None:
        self._inner.put(tensor, offset)
        self._mailbox.count_sent(*self._key, Tally(1, tensor.nbytes))

    def accumulate(self, tensor: Tensor, offset: int = 0, scale: float = 1.0) -> None:
        self._inner.accumulate(tensor, offset, scale)
        self._mailbox.count_sent(*self._key, Tally(1, tensor.nbytes))
