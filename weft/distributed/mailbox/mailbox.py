"""The mailbox seam: peers that come and go, and exchange tagged messages of a small header and tensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractWork
from weft.errors import DeadlineError

__all__ = [
    "FOREVER",
    "JOINED",
    "LEFT",
    "AbstractMailbox",
    "AbstractReceive",
    "Header",
    "Into",
    "Message",
    "Sources",
    "Tags",
]

FOREVER = math.inf
"""A deadline that never comes."""

JOINED = "weft.joined"
"""The tag of the notification that a peer has joined; its header is empty."""

LEFT = "weft.left"
"""The tag of the notification that a peer has gone; its header says why: `{"reason": "it left"}`."""

Tags = str | Collection[str] | None
"""One tag, any of several, or None for all."""

Sources = int | Collection[int] | None
"""One peer, any of several, or None for all."""

Header = Mapping[str, Any] | None
"""A small JSON object beside the tensors of a message; None for an empty one."""

Into = Sequence[Tensor] | None
"""Tensors that a message is received into; None for new ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A message as it is handed out; its tensors belong to the receiver.

    `incarnation`: a peer that comes back has a higher one than before.
    """

    source: int
    tag: str
    header: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()
    incarnation: int = 0


class AbstractReceive(ABC):
    """A message that is asked for and may have come."""

    @abstractmethod
    def wait(self, deadline: float = FOREVER) -> Message:
        """The message, as soon as it is there. May be called again, also after DeadlineError.

        Args:
            deadline: a moment of the mailbox's clock; what is there already is given whatever the time.

        Raises:
            DeadlineError: nothing came in time; names who was waited for.
            PeerLostError: every peer that was asked for has gone, and nothing of theirs is on the way.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    @abstractmethod
    def cancel(self) -> None:
        """Ask no more: its tensors are the caller's again, and what comes goes to whoever asks next."""


class AbstractMailbox(ABC):
    """The mailbox of one peer, known by its address, which is a rank number.

    Rules, held by one contract suite over all kinds:
    - Messages of one source keep their order under each tag. Otherwise they are handed out as they arrive, so a loud
      peer cannot starve the others.
    - A header is a JSON object: text keys, no not-a-number; what arrives is what JSON makes of it (tuples are lists).
    - Tensors of any device can be sent, and received into; where nothing was given to receive into, they are in host
      memory.
    - A tensor given to a call is not touched by the caller until the call is done. A send is done when the tensors may
      be changed again, which does not say that the message has arrived.
    - Peers may come at any time, go at any time, and come back. A send to one that is not there raises PeerLostError.
    - A peer may write to itself. One thread may wait while another sends; closing ends all waiting.
    - Nothing is unpickled. What is malformed, too large, forged or from nobody of the run is refused, and counted.
    """

    address: int
    """Under which the others write to this one."""

    incarnation: int
    """Higher than that of any earlier mailbox with this address."""

    clock: AbstractClock

    @abstractmethod
    def start_send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> AbstractWork:
        """Send without waiting. The work raises PeerLostError where the peer is not there."""

    @abstractmethod
    def start_receive(self, tag: Tags = None, source: Sources = None, *, into: Into = None) -> AbstractReceive:
        """Ask for the next message of these tags and sources.

        Args:
            into: where the message's tensors are to be written, without a copy on the way where the transport can;
                number, shapes and types must be those of the message. Their contents are undefined until then.
        """

    @abstractmethod
    def peers(self) -> dict[int, int]:
        """Who else is there now: address -> incarnation."""

    @abstractmethod
    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        """Return when each of them is there, or has been since the call. Raises DeadlineError, which names the rest."""

    @abstractmethod
    def follow_peers(self) -> None:
        """From now on JOINED and LEFT come as messages, beginning with a JOINED for everyone who is there.

        LEFT comes after every message of that peer. Asking for all tags asks for these two as well.
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in host memory, uninitialised, that peers can read in place where memory is shared: the fast way to
        send."""

    @abstractmethod
    def refusals(self) -> dict[str, int]:
        """How many messages and connections were refused so far, by reason."""

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and give everything back. Sends under way are finished first. Safe to call twice."""

    @final
    def send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> None:
        """Send, and return when the tensors may be changed again."""
        self.start_send(to, tag, header, tensors).wait()

    @final
    def receive(
        self, tag: Tags = None, source: Sources = None, *, deadline: float = FOREVER, into: Into = None
    ) -> Message:
        """The next message of these tags and sources. Raises as `AbstractReceive.wait` does."""
        receive = self.start_receive(tag, source, into=into)
        try:
            return receive.wait(deadline)
        finally:
            receive.cancel()

    @final
    def poll(self, tag: Tags = None, source: Sources = None) -> Message | None:
        """The next message of these tags and sources if it is there already, else None."""
        try:
            return self.receive(tag, source, deadline=-math.inf)
        except DeadlineError:
            return None
