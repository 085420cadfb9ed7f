"""Switches of the process that trains: its threads, and the memory that it keeps."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["keep_freed_memory", "use_threads"]

# Of <malloc.h>; the values of mallopt are C ints.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_MAPPED, MAX_KEPT = 2**30, 2**31 - 1  # bytes


def keep_freed_memory() -> bool:
    """Have the C library reuse tensors of up to 1 GiB instead of mapping them anew; whether it could be told so.

    Left alone, glibc gives every block above 32 MB back to the system when it is freed, and the system hands out its
    pages again one by one, filled with zeros. A step allocates and frees all of its gradients: on a multilayer
    perceptron of 21M parameters that took a third of the step. The price is that the process stays at its peak.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_MAPPED)) and bool(mallopt(M_TRIM_THRESHOLD, MAX_KEPT))


@contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    """Compute with so many threads: a matrix product over another number adds in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
