"""Where the tensors of a message are written while it comes in: the tensors of a waiting request, or new ones."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.mailbox.inbox import ReceiveRequest
from weft.distributed.mailbox.payload import view_bytes
from weft.specs import TensorSpec

__all__ = ["ReceiveBuffer", "fits_in_place"]


def fits_in_place(request: ReceiveRequest, specs: Sequence[TensorSpec]) -> bool:
    """Whether a message of these tensors can be written straight into those of the request, byte by byte."""
    if request.into is None or not all(tensor.is_contiguous() for tensor in request.into):
        return False
    return [TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in request.into] == list(specs)


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
    def tensors(self) -> tuple[Tensor, ...]:
        return self._tensors

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
            for tensor in self._tensors:
                tensor.detach().view(-1).view(torch.uint8).copy_(source[: tensor.nbytes])
                source = source[tensor.nbytes :]
            self._index = len(self._views)

    def detach(self) -> None:
        with self._lock:
            self.request = None
            self._set_tensors(tuple(tensor.clone() for tensor in self._tensors))

    def _set_tensors(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = tensors
        self._views = [view_bytes(tensor) for tensor in tensors if tensor.numel()]
