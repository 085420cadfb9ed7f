"""Windows in virtual time: every operation takes what its bytes take on the links, and happens when they arrive."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from weft.distributed.mailbox.reception import explain_gone
from weft.distributed.mailbox.virtual.room import MailRoom
from weft.distributed.mailbox.window import AbstractWindow, ChunkedWindow, check_reach

__all__ = ["VirtualWindow"]


@final
class VirtualWindow(AbstractWindow):
    """One rank's way into a window of another; its own window costs nothing."""

    def __init__(self, room: MailRoom, rank: int, owner: int, name: str) -> None:
        self._room = room
        self._rank = rank
        self._owner = owner
        self._name = name
        self._inner = room.windows[owner, name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._inner.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    def get(self, out: Tensor, offset: int = 0) -> None:
        check_reach(self, out, offset)
        copy = torch.empty_like(out, memory_format=torch.contiguous_format)
        self._reach(0, lambda window: window.get(copy, offset))
        if self._owner != self._rank:
            self._pass(self._owner, self._rank, out.nbytes)
        out.detach().copy_(copy)

    def put(self, tensor: Tensor, offset: int = 0) -> None:
        check_reach(self, tensor, offset)
        self._reach(tensor.nbytes, lambda window: window.put(tensor, offset))

    def accumulate(self, tensor: Tensor, offset: int = 0, scale: float = 1.0) -> None:
        check_reach(self, tensor, offset)
        self._reach(tensor.nbytes, lambda window: window.accumulate(tensor, offset, scale))

    def _reach(self, num_bytes: int, operation: Callable[[ChunkedWindow], None]) -> None:
        """Carry the operation out when so many bytes have arrived at the owner."""
        if self._owner != self._rank:
            self._pass(self._rank, self._owner, num_bytes)
        window = self._room.windows.get((self._owner, self._name))
        if window is not self._inner:
            reason, _ = self._room.gone.get(self._owner, ("it exposes the window no more", None))
            raise explain_gone(self._owner, reason)
        operation(window)

    def _pass(self, source: int, target: int, num_bytes: int) -> None:
        """Let the time pass that these bytes take."""
        received = self._room.office.book(source, target, num_bytes).received
        self._room.scheduler.sleep_until(self._rank, received)
