"""Mailboxes of one process: peers are threads, and a message is a copy."""

import threading
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractWork, DoneWork
from weft.distributed.mailbox.endpoint import AbstractEndpoint, lost_send
from weft.distributed.mailbox.mailbox import AbstractMailbox, Message
from weft.distributed.mailbox.receiver import Receiver, Roster, ThreadMonitor
from weft.errors import UsageError

__all__ = ["LocalTransport"]


@final
class LocalTransport:
    """Carries messages between the mailboxes of one process.

    >>> import torch
    >>> transport = LocalTransport()
    >>> server, worker = transport.open(0), transport.open(1)
    >>> worker.send(0, "push", {"step": 7}, [torch.ones(2)])
    >>> message = server.receive("push")
    >>> message.source, message.header["step"], message.tensors
    (1, 7, (tensor([1., 1.]),))
    >>> worker.close(), server.close()
    (None, None)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[int, Receiver] = {}
        self._num_joined = 0

    def open(self, address: int) -> AbstractMailbox:
        """A mailbox for a new peer, or for one that comes back."""
        with self._lock:
            if address in self._receivers:
                raise UsageError(f"address is taken (address: {address}); close its mailbox before")
            receiver = Receiver(address, self._num_joined, monitor=ThreadMonitor(), roster=Roster())
            self._num_joined += 1
            for other in self._receivers.values():
                other.join(address, receiver.incarnation)
                receiver.join(other.address, other.incarnation)
            self._receivers[address] = receiver
        return _LocalMailbox(self, receiver)

    def deliver(self, to: int, message: Message) -> bool:
        """Whether there is somebody to deliver to."""
        with self._lock:
            target = self._receivers.get(to)
            if target is not None:
                target.deliver(message)
            return target is not None

    def leave(self, address: int, incarnation: int) -> None:
        with self._lock:
            del self._receivers[address]
            for other in self._receivers.values():
                other.leave(address, incarnation, "it left")


@final
class _LocalMailbox(AbstractEndpoint):
    """One peer of a LocalTransport."""

    def __init__(self, transport: LocalTransport, receiver: Receiver) -> None:
        super().__init__(receiver)
        self._transport = transport

    def _transmit(self, to: int, tag: str, header: bytes, tensors: tuple[Tensor, ...]) -> AbstractWork:
        if self._transport.deliver(to, self._copy_message(tag, header, tensors)):
            return DoneWork()
        return lost_send(self._receiver.roster.explain_absence(to))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def close(self) -> None:
        if self._receiver.close():
            self._transport.leave(self.address, self.incarnation)
