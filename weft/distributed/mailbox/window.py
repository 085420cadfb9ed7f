"""One-sided windows: a tensor of one peer that others read, write and add to without its help."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import prod
from typing import final

import torch
from torch import Tensor

from weft.errors import UsageError

__all__ = ["CHUNK", "AbstractWindow", "ChunkedWindow", "check_reach", "cut"]

CHUNK = 2**16
"""Elements that are read, written or added to as one: chunk i holds elements i * CHUNK to (i + 1) * CHUNK - 1."""


class AbstractWindow(ABC):
    """What a peer exposes, seen as a flat row of elements. Every operation is done when it returns.

    Two operations on one chunk never mix, whoever makes them; over several chunks nothing is promised. A process killed
    in the middle of an operation leaves at most one chunk half written and no lock behind. The owner's own use of its
    tensor is not guarded: it opens a window of its own where that matters.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abstractmethod
    def get(self, out: Tensor, offset: int = 0) -> None:
        """Fill `out` from the elements that begin at `offset`."""

    @abstractmethod
    def put(self, tensor: Tensor, offset: int = 0) -> None:
        """Write the tensor over the elements that begin at `offset`."""

    @abstractmethod
    def accumulate(self, tensor: Tensor, offset: int = 0, scale: float = 1.0) -> None:
        """Add `scale` times the tensor to the elements that begin at `offset`."""


def check_reach(window: AbstractWindow, tensor: Tensor, offset: int) -> None:
    """Raise UsageError where an operation would leave the window, or change types."""
    num_elements = prod(window.shape)
    if tensor.dtype != window.dtype:
        raise UsageError(f"window holds another type (window: {window.dtype}, tensor: {tensor.dtype}); convert it")
    if offset < 0 or offset + tensor.numel() > num_elements:
        raise UsageError(
            f"window is too small (elements: {num_elements}, offset: {offset}, asked for: {tensor.numel()}); "
            "stay inside it"
        )


def cut(offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(chunk, begin, end) of the pieces of a row, one for each chunk that it touches.

    >>> list(cut(CHUNK - 1, 3)) == [(0, CHUNK - 1, CHUNK), (1, CHUNK, CHUNK + 2)]
    True
    """
    end = offset + length
    while offset < end:
        chunk = offset // CHUNK
        stop = min(end, (chunk + 1) * CHUNK)
        yield chunk, offset, stop
        offset = stop


@final
class ChunkedWindow(AbstractWindow):
    """Memory that this process can reach; `guard(chunk)` keeps all others out of a chunk for a while."""

    def __init__(self, tensor: Tensor, guard: Callable[[int], AbstractContextManager[object]]) -> None:
        self._shape = tuple(tensor.shape)
        self._row = tensor.detach().view(-1)
        self._guard = guard

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._row.dtype

    def get(self, out: Tensor, offset: int = 0) -> None:
        dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        for target, piece, guard in self._pieces(dense, offset):
            with guard:
                target.copy_(piece)
        if dense is not out:
            out.detach().copy_(dense)

    def put(self, tensor: Tensor, offset: int = 0) -> None:
        for source, piece, guard in self._pieces(tensor, offset):
            with guard:
                piece.copy_(source)

    def accumulate(self, tensor: Tensor, offset: int = 0, scale: float = 1.0) -> None:
        for source, piece, guard in self._pieces(tensor, offset):
            with guard:
                piece.add_(source, alpha=scale)

    def _pieces(self, tensor: Tensor, offset: int) -> Iterator[tuple[Tensor, Tensor, AbstractContextManager[object]]]:
        check_reach(self, tensor, offset)
        row = tensor.detach().reshape(-1)
        for chunk, begin, end in cut(offset, row.numel()):
            yield row[begin - offset : end - offset], self._row[begin:end], self._guard(chunk)
