"""One peer of the virtual cluster: messages over modelled links, in virtual time."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.faulty import FaultyGroup
from weft.distributed.group.group import AbstractGroup, AbstractWork, DoneWork
from weft.distributed.group.recording import RecordingGroup
from weft.distributed.mailbox.inbox import Ask
from weft.distributed.mailbox.lost import LostWork
from weft.distributed.mailbox.mailbox import FOREVER, JOINED, AbstractMailbox, AbstractReceive, Message, Sources, Tags
from weft.distributed.mailbox.payload import check_tag, decode_header, encode_header, prepare_tensors
from weft.distributed.mailbox.reception import explain_deadline, explain_gone, explain_loss
from weft.distributed.mailbox.virtual.room import MailRoom, MailWait, Pigeonhole
from weft.distributed.mailbox.virtual.window import VirtualWindow
from weft.distributed.mailbox.window import AbstractWindow, ChunkedWindow
from weft.distributed.virtual import VirtualGroup
from weft.errors import DeadlineError, UsageError

__all__ = ["VirtualMailbox"]


@final
class VirtualMailbox(AbstractMailbox):
    """A mailbox for the rank of a virtual group; its address is the rank in the whole cluster.

    A peer is there from when it opens its mailbox until it closes it, dies or its program returns. Polling takes no
    virtual time: a loop that only polls never ends; charge or wait in between.

    >>> import torch
    >>> from weft.distributed.virtual import run_virtual
    >>> def program(group):
    ...     mailbox = VirtualMailbox(group)
    ...     mailbox.await_peers({0, 1})
    ...     if mailbox.address == 1:
    ...         mailbox.send(0, "push", {"step": 7}, [torch.ones(2)])
    ...         return None
    ...     message = mailbox.receive("push")
    ...     return message.source, message.header["step"]
    >>> run_virtual(program, 2).results
    ((1, 7), None)
    """

    def __init__(self, group: AbstractGroup) -> None:
        virtual = _unwrap(group)
        self._clock = group.clock
        self._rank = virtual.cluster_rank
        self._room = virtual.network.find_transport(MailRoom, MailRoom)
        self._hole: Pigeonhole = self._room.join(self._rank)

    @property
    def address(self) -> int:
        return self._rank

    @property
    def incarnation(self) -> int:
        return self._hole.incarnation

    @property
    def clock(self) -> AbstractClock:
        return self._clock

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        self._check_open()
        check_tag(tag)
        encoded = encode_header(header)
        copies = tuple(tensor.clone() for tensor in prepare_tensors(tensors))
        message = Message(self._rank, tag, decode_header(encoded), copies, self.incarnation)
        if to not in self._room.holes:
            return LostWork(explain_gone(to, self._room.reasons().get(to)))
        if to == self._rank:
            self._room.deliver(to, self.incarnation, message)
            return DoneWork()
        num_bytes = len(encoded) + sum(tensor.nbytes for tensor in copies)
        return _VirtualSend(self._room, self._rank, self._room.send(self._rank, to, num_bytes, message))

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> "_VirtualReceive":
        self._check_open()
        ask = Ask(tag, source, into)
        ask.losses, ask.born = self._room.losses(self._rank, ask), self._room.num_joined
        self._hole.inbox.ask(ask)
        return _VirtualReceive(self, ask)

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float = FOREVER) -> int:
        asks = [_ask_of(receive) for receive in receives]
        if not asks:
            raise UsageError("there is nothing to wait for (receives: 0); give at least one")
        wait = MailWait(asks)
        came = self._room.wait(
            self._rank, wait, lambda: any(ask.message for ask in asks) or self._is_vain(asks), deadline
        )
        done = [index for index, ask in enumerate(asks) if ask.message is not None]
        if done:
            return min(done, key=lambda index: asks[index].number)
        if not came:
            raise explain_deadline(asks, self._others())
        self._check_open()
        raise explain_loss(asks[0])

    def is_settled(self, ask: Ask) -> bool:
        self._room.scheduler.check()
        return ask.message is not None or self._is_vain([ask])

    def withdraw(self, ask: Ask) -> None:
        self._hole.inbox.withdraw(ask)

    def peers(self) -> dict[int, int]:
        holes = sorted(self._room.holes.items())
        return {rank: hole.incarnation for rank, hole in holes if rank != self._rank}

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._check_open()
        room, before = self._room, self._room.num_joined
        absent = frozenset(addresses) - room.holes.keys()

        def find_missing() -> tuple[int, ...]:
            return tuple(sorted(peer for peer in absent if room.latest.get(peer, -1) < before))

        if not room.wait(self._rank, MailWait(peers=absent), lambda: not find_missing(), deadline):
            missing = find_missing()
            raise DeadlineError(
                f"peers did not join in time (missing: {list(missing)}); start them, or wait longer", missing
            )

    def follow_peers(self) -> None:
        self._check_open()
        if not self._hole.follows:
            self._hole.follows = True
            for peer, incarnation in self.peers().items():
                self._hole.inbox.deliver(Message(peer, JOINED, {}, incarnation=incarnation))

    def expose(self, name: str, tensor: Tensor) -> Tensor:
        self._check_open()
        (dense,) = prepare_tensors([tensor])
        self._room.windows[self._rank, name] = ChunkedWindow(dense, lambda _: nullcontext())
        self._room.wake(lambda wait: self._rank in wait.peers)
        return dense

    def window(self, peer: int, name: str, deadline: float = FOREVER) -> AbstractWindow:
        self._check_open()
        wait = MailWait(peers=frozenset((peer,)))
        room = self._room
        if not room.wait(self._rank, wait, lambda: (peer, name) in room.windows or peer in room.gone, deadline):
            raise DeadlineError(f"window was not exposed in time (peer: {peer}, name: {name}); wait longer", (peer,))
        if peer in room.gone:
            raise explain_gone(peer, room.reasons()[peer])
        return VirtualWindow(room, self._rank, peer, name)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def refusals(self) -> dict[str, int]:
        return dict(sorted(self._hole.refused.items()))

    def close(self) -> None:
        if self._is_open:
            self._room.leave(self._rank, "it left")

    @property
    def _is_open(self) -> bool:
        return self._room.holes.get(self._rank) is self._hole

    def _check_open(self) -> None:
        self._room.scheduler.check()
        if not self._is_open:
            raise UsageError(f"mailbox is closed (address: {self._rank}); open a new one")

    def _others(self) -> list[int]:
        return [rank for rank in self._room.holes if rank != self._rank]

    def _is_vain(self, asks: Sequence[Ask]) -> bool:
        return not self._is_open or all(ask.is_vain for ask in asks)


@final
class _VirtualSend(AbstractWork):
    """Done when the last byte has left."""

    def __init__(self, room: MailRoom, rank: int, done_at: float) -> None:
        self._room = room
        self._rank = rank
        self._done_at = done_at

    def wait(self) -> None:
        self._room.scheduler.sleep_until(self._rank, self._done_at)

    def is_done(self) -> bool:
        self._room.scheduler.check()
        return self._done_at <= self._room.scheduler.now


@final
class _VirtualReceive(AbstractReceive):
    """An ask and the mailbox that it waits at."""

    def __init__(self, mailbox: VirtualMailbox, ask: Ask) -> None:
        self._mailbox = mailbox
        self.ask = ask

    def wait(self, deadline: float = FOREVER) -> Message:
        if not self.ask.is_taken:
            self._mailbox.wait_any([self], deadline)
        return self.ask.take()

    def is_done(self) -> bool:
        return self.ask.is_taken or self._mailbox.is_settled(self.ask)

    def cancel(self) -> None:
        if not self.ask.is_taken:
            self._mailbox.withdraw(self.ask)


def _ask_of(receive: AbstractReceive) -> Ask:
    if not isinstance(receive, _VirtualReceive):
        raise UsageError(f"receive is of another kind of mailbox ({type(receive).__name__}); use start_receive of this")
    return receive.ask


def _unwrap(group: AbstractGroup) -> VirtualGroup:
    while isinstance(group, FaultyGroup | RecordingGroup):
        group = group.inner
    if not isinstance(group, VirtualGroup):
        raise UsageError(f"group is not of the virtual cluster ({type(group).__name__}); use run_virtual")
    return group
