"""Windows in shared memory: anonymous memory of the owner, one lock of the kernel for each chunk.

The locks are record locks of the open memory, byte i for chunk i: the kernel gives them back when a process ends,
however it ends. Threads that share one opening are kept apart by a lock of their own.
"""

import fcntl
import json
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import final

import numpy as np
import torch
from torch import Tensor

from weft.distributed.group.shared_memory.rendezvous import Invitation
from weft.distributed.mailbox.payload import DTYPES
from weft.distributed.mailbox.sockets.directory import AbstractDirectory
from weft.distributed.mailbox.sockets.memory import invite, map_shared
from weft.distributed.mailbox.window import ChunkedWindow

__all__ = ["SharedWindows"]

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, process (none: the lock is the opening's)


@final
class SharedWindows:
    """What this peer exposes, and what it has opened of others. Names are notes in the directory."""

    def __init__(self, directory: AbstractDirectory) -> None:
        self._directory = directory
        self._opened: dict[str, ChunkedWindow] = {}

    def expose(self, incarnation: int, name: str, tensor: Tensor) -> Tensor:
        descriptor = os.memfd_create("weft-window")
        os.truncate(descriptor, max(1, tensor.nbytes))
        shared = _view(descriptor, tuple(tensor.shape), tensor.dtype)
        shared.copy_(tensor)
        key = _key(incarnation, name)
        self._opened[key] = _window(descriptor, shared)
        note = {"memory": str(invite(descriptor)), "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}
        self._directory.put_note(key, json.dumps(note))
        return shared

    def find(self, incarnation: int, name: str) -> ChunkedWindow | None:
        """The window of this life of a peer; None while it is not exposed."""
        key = _key(incarnation, name)
        if key not in self._opened:
            note = self._directory.read_note(key)
            if note is None:
                return None
            form = json.loads(note)
            descriptor = Invitation.parse(form["memory"]).open()
            if descriptor is None:
                return None
            self._opened[key] = _window(descriptor, _view(descriptor, tuple(form["shape"]), DTYPES[form["dtype"]]))
        return self._opened[key]

    def close(self) -> None:
        self._opened.clear()


def _key(incarnation: int, name: str) -> str:
    return f"window-{incarnation}-{name.encode().hex()}"


def _view(descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = map_shared(descriptor, num_bytes)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


def _window(descriptor: int, shared: Tensor) -> ChunkedWindow:
    threads = threading.Lock()

    def set_lock(kind: int, chunk: int) -> None:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, chunk, 1, 0))

    @contextmanager
    def guard(chunk: int) -> Iterator[None]:
        with threads:
            set_lock(fcntl.F_WRLCK, chunk)
            try:
                yield
            finally:
                set_lock(fcntl.F_UNLCK, chunk)

    window = ChunkedWindow(shared, guard)
    weakref.finalize(window, os.close, descriptor)
    return window
