"""Matching of messages with receive requests, in order. No thread, no clock.

    arrived, by number    1: push from 2   2: pull from 1   3: push from 1
    requested, in order   (pull, from anyone) -> 2      (anything, from 1) -> 3

A new request takes the first arrival that matches; an arrival goes to the first request that matches.
"""

import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.mailbox.mailbox import JOINED, LEFT, Into, Message, Sources, Tags
from weft.distributed.mailbox.payload import fill, view_bytes
from weft.errors import UsageError
from weft.specs import TensorSpec

__all__ = ["Inbox", "ReceiveBuffer", "ReceiveRequest"]


@final
class ReceiveRequest:
    """One message that is asked for. `number` is its place among the arrivals, once it has come."""

    def __init__(self, tag: Tags, source: Sources, into: Into) -> None:
        self.tags = None if tag is None else frozenset((tag,) if isinstance(tag, str) else tag)
        self.sources = None if source is None else frozenset((source,) if isinstance(source, int) else source)
        if frozenset() in (self.tags, self.sources):
            raise UsageError("a receive asks for nothing (no tag or no source); name at least one, or None for all")
        self.into = None if into is None else tuple(into)
        self.message: Message | None = None
        self.number = 0
        # Set while its message comes in, and nothing else may be given to it: moves what has come out of `into`.
        self.detach: Callable[[], None] | None = None
        self.is_in_place = False  # the message's tensors are those of `into`
        self.losses: dict[int, str] = {}  # sources that have gone since it was made, and why
        self.num_joined = 0  # how many peers had joined by then; counted where news of an end may come late
        self._result: Message | None = None

    def matches(self, source: int, tag: str) -> bool:
        return (self.sources is None or source in self.sources) and (self.tags is None or tag in self.tags)

    def fits_in_place(self, specs: Sequence[TensorSpec]) -> bool:
        """Whether a message of these tensors can be written straight into those given for it, byte by byte."""
        if self.into is None or not all(tensor.is_contiguous() and tensor.is_cpu for tensor in self.into):
            return False
        return [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in self.into] == list(specs)

    @property
    def is_lost(self) -> bool:
        """Whether nothing can come any more. A source that comes back does not know what was asked before, but that
        it comes back may be just what is asked for."""
        if self.sources is None or self.detach is not None or (self.tags is not None and JOINED in self.tags):
            return False
        return self.sources <= self.losses.keys()

    @property
    def is_taken(self) -> bool:
        return self._result is not None

    def take(self) -> Message:
        """The message, its tensors where they were asked to be; the same again when asked again."""
        if self._result is None:
            assert self.message is not None, "the message has come"
            if self.into is None or self.is_in_place or self.message.tag in (JOINED, LEFT):
                self._result = self.message
            else:
                self._result = replace(self.message, tensors=fill(self.into, self.message.tensors))
        return self._result

    def describe(self, peers: Collection[int]) -> tuple[str, tuple[int, ...]]:
        """The tags and sources in words, and the peers waited for; `peers` are those who are there."""
        awaited = tuple(sorted(peers if self.sources is None else self.sources))
        tags = "any tag" if self.tags is None else f"tag: {', '.join(sorted(self.tags))}"
        names = ", ".join(map(str, awaited)) or "anyone"
        return f"{tags}, waited for: {names}", awaited


@final
class ReceiveBuffer:
    """Filled by the transport's thread. The caller may cancel the request, and so want its tensors back, before the
    message is complete: `detach` moves what has come to new ones."""

    def __init__(self, request: ReceiveRequest | None, specs: Sequence[TensorSpec]) -> None:
        self.request = request
        self._lock = threading.Lock()
        into = request.into if request is not None else None
        self._set_tensors(tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs) if into is None else into)
        self._index, self._offset = 0, 0  # of the next byte: which view, and where in it

    @property
    def is_full(self) -> bool:
        return self._index == len(self._views)

    def digest(self, digest: Callable[[Sequence[memoryview]], bytes]) -> bytes:
        """The digest of what has come. `detach` waits for it: what the caller writes next is not the message's."""
        with self._lock:
            return digest(self._views)

    def receive(self, connection: socket.socket) -> int:
        """Read what a socket has; 0 at its end. Raises BlockingIOError where there is nothing now."""
        with self._lock:
            view = self._views[self._index]
            count = connection.recv_into(view[self._offset :])
            self._offset += count
            if self._offset == view.nbytes:
                self._index, self._offset = self._index + 1, 0
            return count

    def copy(self, source: Tensor) -> None:
        """Take everything at once from a flat tensor of bytes."""
        with self._lock:
            for tensor in self.tensors:
                tensor.detach().view(-1).view(torch.uint8).copy_(source[: tensor.nbytes])
                source = source[tensor.nbytes :]
            self._index = len(self._views)

    def detach(self) -> None:
        with self._lock:
            self.request = None
            self._set_tensors(tuple(tensor.clone() for tensor in self.tensors))

    def _set_tensors(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self._views = [view_bytes(tensor) for tensor in tensors if tensor.numel()]


@final
class Inbox:
    """The arrivals that nobody has requested yet, and the requests that nothing has come for yet."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[int, Message]] = deque()
        self._requests: list[ReceiveRequest] = []
        self._num_arrivals = 0

    def add(self, request: ReceiveRequest) -> None:
        """Complete a request with the first arrival that matches, or keep it."""
        for index, (number, message) in enumerate(self._arrived):
            if request.matches(message.source, message.tag):
                del self._arrived[index]
                request.number, request.message = number, message
                return
        self._requests.append(request)

    def deliver(self, message: Message) -> list[ReceiveRequest]:
        """Complete the first request that an arrival matches, or keep the arrival; returns what was completed."""
        self._num_arrivals += 1
        return self._hand_out(self._num_arrivals, message)

    def lose(self, source: int, reason: str, returned_as: int | None = None) -> list[ReceiveRequest]:
        """A source has gone, and all of its messages are in; returns the requests that are lost now.

        Where it has come back already (as that incarnation), requests made since are meant for that one.
        """
        concerned = [request for request in self._requests if request.sources is not None and source in request.sources]
        if returned_as is not None:
            concerned = [request for request in concerned if request.num_joined <= returned_as]
        for request in concerned:
            request.losses[source] = reason
        return [request for request in concerned if request.is_lost]

    def match(self, source: int, tag: str) -> ReceiveRequest | None:
        """The request that a message would complete now."""
        free = (request for request in self._requests if request.detach is None)
        return next((request for request in free if request.matches(source, tag)), None)

    def complete_in_place(self, request: ReceiveRequest, message: Message) -> None:
        """The message that was received straight into the request's tensors is complete."""
        self._num_arrivals += 1
        self._requests.remove(request)
        request.is_in_place = True
        request.number, request.message = self._num_arrivals, message

    def release(self, request: ReceiveRequest) -> None:
        """The message that was being received into the request's tensors will not be completed."""
        self._requests.remove(request)
        request.detach = None
        self.add(request)

    def cancel(self, request: ReceiveRequest) -> None:
        """Forget a request; a message that came for it and was not taken goes to the next that matches."""
        if request in self._requests:
            self._requests.remove(request)
            if request.detach is not None:
                request.detach()
        elif request.message is not None and not request.is_taken:
            message, request.message = request.message, None
            if request.is_in_place:
                message = replace(message, tensors=tuple(tensor.clone() for tensor in message.tensors))
            self._hand_out(request.number, message)

    def _hand_out(self, number: int, message: Message) -> list[ReceiveRequest]:
        request = self.match(message.source, message.tag)
        if request is not None:
            self._requests.remove(request)
            request.number, request.message = number, message
            return [request]
        at = len(self._arrived)
        while at and self._arrived[at - 1][0] > number:
            at -= 1
        self._arrived.insert(at, (number, message))
        return []
