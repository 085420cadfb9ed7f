"""Memory that a training step frees stays with the process for the next step."""

import ctypes

__all__ = ["keep_freed_memory"]

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
