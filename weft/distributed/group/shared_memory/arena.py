"""Tensors inside the shared segment: a first-fit allocator over one rank's arena."""

import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from math import prod

import numpy as np
import torch
from torch import Tensor

from weft.errors import UsageError

__all__ = ["Arena", "FreeList"]

ALIGNMENT = 4096


class FreeList:
    """Which parts of `num_bytes` are free: sorted, never touching gaps."""

    def __init__(self, num_bytes: int) -> None:
        self.gaps: list[tuple[int, int]] = [(0, num_bytes)]  # offset, length

    def take(self, num_bytes: int) -> int | None:
        """The offset of a part of this length, or None when no gap is long enough."""
        for index, (offset, length) in enumerate(self.gaps):
            if length >= num_bytes:
                rest = [(offset + num_bytes, length - num_bytes)] if length > num_bytes else []
                self.gaps[index : index + 1] = rest
                return offset
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        insort(self.gaps, (offset, num_bytes))
        merged: list[tuple[int, int]] = []
        for begin, length in self.gaps:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self.gaps = merged


class Arena:
    """Gives out tensors in `memory` and takes their bytes back when they are gone.

    A tensor keeps the mapping alive, so it stays valid when the group is closed.
    """

    def __init__(self, memory: mmap.mmap, offset: int, num_bytes: int) -> None:
        self._memory = memory
        self._offset = offset
        self._free = FreeList(num_bytes)
        self._dropped: deque[tuple[int, int]] = deque()  # offset, length: free again, but not yet in `_free`
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        taken = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._sweep()
            offset = self._free.take(taken)
        if offset is None:
            raise UsageError(f"the shared arena is full (asked for: {num_bytes} bytes); drop tensors of group.empty()")
        block = np.frombuffer(self._memory, np.uint8, num_bytes, self._offset + offset)
        # The garbage collector may drop a block in the very thread that holds the lock: it must not wait for it.
        weakref.finalize(block, self._dropped.append, (offset, taken)).atexit = False
        return torch.from_numpy(block).view(dtype).view(shape)

    def _sweep(self) -> None:
        while self._dropped:
            self._free.give_back(*self._dropped.popleft())
