"""Where the tensors of a message are written while it comes in: into those made ready for it, or into new ones."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.mailbox.inbox import Ask
from weft.distributed.mailbox.payload import as_row
from weft.specs import TensorSpec

__all__ = ["Landing", "fits_in_place"]


def fits_in_place(ask: Ask, specs: Sequence[TensorSpec]) -> bool:
    """Whether a message of these tensors can be written where the ask wants it, byte by byte."""
    if ask.into is None or not all(tensor.is_contiguous() for tensor in ask.into):
        return False
    return [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in ask.into] == list(specs)


@final
class Landing:
    """Filled by the transport's thread. Whoever made tensors ready may want them back before the message is whole:
    `evacuate` moves what has come."""

    def __init__(self, ask: Ask | None, specs: Sequence[TensorSpec]) -> None:
        self.ask = ask
        self._lock = threading.Lock()
        ready = ask.into if ask is not None else None
        self._set_tensors(tuple(torch.empty(s.shape, dtype=s.dtype) for s in specs) if ready is None else ready)
        self._row, self._offset = 0, 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

    @property
    def is_full(self) -> bool:
        return self._row == len(self._rows)

    def digest(self, digest: Callable[[Sequence[memoryview]], bytes]) -> bytes:
        """Of what has come. Whoever wants the tensors back waits: what they write there is not the message's."""
        with self._lock:
            return digest(self._rows)

    def receive(self, connection: socket.socket) -> int:
        """Take what a socket has; 0 at its end. Raises BlockingIOError where there is nothing now."""
        with self._lock:
            row = self._rows[self._row]
            count = connection.recv_into(row[self._offset :])
            self._offset += count
            if self._offset == row.nbytes:
                self._row, self._offset = self._row + 1, 0
            return count

    def copy(self, source: Tensor) -> None:
        """Take everything at once from a row of bytes."""
        with self._lock:
            for tensor in self._tensors:
                tensor.detach().view(-1).view(torch.uint8).copy_(source[: tensor.nbytes])
                source = source[tensor.nbytes :]
            self._row = len(self._rows)

    def evacuate(self) -> None:
        with self._lock:
            self.ask = None
            self._set_tensors(tuple(tensor.clone() for tensor in self._tensors))

    def _set_tensors(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        self._rows = [as_row(tensor) for tensor in tensors if tensor.numel()]
