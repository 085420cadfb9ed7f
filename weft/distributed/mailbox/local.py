"""Mailboxes of one process: peers are threads, and a message is a copy."""

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.group import AbstractWork, DoneWork
from weft.distributed.mailbox.lost import LostWork
from weft.distributed.mailbox.mailbox import FOREVER, AbstractMailbox, AbstractReceive, Message, Sources, Tags
from weft.distributed.mailbox.payload import check_tag, decode_header, encode_header, prepare_tensors
from weft.distributed.mailbox.reception import Reception, explain_gone
from weft.distributed.mailbox.window import CHUNK, AbstractWindow, ChunkedWindow
from weft.errors import DeadlineError, UsageError

__all__ = ["LocalMailbox", "LocalPost"]


@final
class LocalPost:
    """What the mailboxes of one process share.

    >>> import torch
    >>> post = LocalPost()
    >>> server, worker = post.open(0), post.open(1)
    >>> worker.send(0, "push", {"step": 7}, [torch.ones(2)])
    >>> message = server.receive("push")
    >>> message.source, message.header["step"], message.tensors
    (1, 7, (tensor([1., 1.]),))
    >>> worker.close(), server.close()
    (None, None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receptions: dict[int, Reception] = {}
        self._windows: dict[tuple[int, str], ChunkedWindow] = {}
        self._exposed = threading.Condition()
        self._num_joined = 0

    def open(self, address: int) -> "LocalMailbox":
        """A mailbox for a new peer, or for one that comes back."""
        with self._lock:
            if address in self._receptions:
                raise UsageError(f"address is taken (address: {address}); close its mailbox before")
            reception = Reception(address, self._num_joined)
            self._num_joined += 1
            for other in self._receptions.values():
                other.join(address, reception.incarnation)
                reception.join(other.address, other.incarnation)
            self._receptions[address] = reception
        return LocalMailbox(self, reception)

    def deliver(self, to: int, message: Message) -> bool:
        """Whether there is somebody to deliver to."""
        with self._lock:
            target = self._receptions.get(to)
            if target is not None:
                target.deliver(message)
            return target is not None

    def leave(self, address: int, incarnation: int) -> None:
        with self._lock:
            del self._receptions[address]
            for other in self._receptions.values():
                other.leave(address, incarnation, "it left")
        with self._exposed:
            self._windows = {key: window for key, window in self._windows.items() if key[0] != address}
            self._exposed.notify_all()

    def expose(self, address: int, name: str, tensor: Tensor) -> None:
        locks = [threading.Lock() for _ in range(0, max(1, tensor.numel()), CHUNK)]
        with self._exposed:
            self._windows[address, name] = ChunkedWindow(tensor, locks.__getitem__)
            self._exposed.notify_all()

    def find_window(self, asker: Reception, peer: int, name: str, deadline: float) -> ChunkedWindow:
        with self._exposed:
            while (peer, name) not in self._windows:
                asker.check_open()
                loss = asker.find_loss(peer)
                if loss is not None and asker.has_gone(peer):
                    raise loss
                remaining = deadline - asker.clock.now()
                if remaining <= 0:
                    raise DeadlineError(
                        f"window was not exposed in time (peer: {peer}, name: {name}); wait longer", (peer,)
                    )
                self._exposed.wait(min(remaining, threading.TIMEOUT_MAX))
            return self._windows[peer, name]


@final
class LocalMailbox(AbstractMailbox):
    """One peer of a LocalPost."""

    def __init__(self, post: LocalPost, reception: Reception) -> None:
        self._post = post
        self._reception = reception

    @property
    def address(self) -> int:
        return self._reception.address

    @property
    def incarnation(self) -> int:
        return self._reception.incarnation

    @property
    def clock(self) -> AbstractClock:
        return self._reception.clock

    def start_send(
        self, to: int, tag: str, header: Mapping[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> AbstractWork:
        self._reception.check_open()
        check_tag(tag)
        copies = tuple(tensor.clone() for tensor in prepare_tensors(tensors))
        copy = decode_header(encode_header(header))
        if self._post.deliver(to, Message(self.address, tag, copy, copies, self.incarnation)):
            return DoneWork()
        return LostWork(self._reception.find_loss(to) or explain_gone(to, None))

    def start_receive(
        self, tag: Tags = None, source: Sources = None, *, into: Sequence[Tensor] | None = None
    ) -> AbstractReceive:
        return self._reception.start_receive(tag, source, into)

    def wait_any(self, receives: Sequence[AbstractReceive], deadline: float = FOREVER) -> int:
        return self._reception.wait_any(receives, deadline)

    def peers(self) -> dict[int, int]:
        return self._reception.peers()

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._reception.await_peers(addresses, deadline)

    def follow_peers(self) -> None:
        self._reception.follow_peers()

    def expose(self, name: str, tensor: Tensor) -> Tensor:
        self._reception.check_open()
        (dense,) = prepare_tensors([tensor])
        self._post.expose(self.address, name, dense)
        return dense

    def window(self, peer: int, name: str, deadline: float = FOREVER) -> AbstractWindow:
        self._reception.check_open()
        return self._post.find_window(self._reception, peer, name, deadline)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def refusals(self) -> dict[str, int]:
        return self._reception.refusals()

    def close(self) -> None:
        if self._reception.close():
            self._post.leave(self.address, self.incarnation)
