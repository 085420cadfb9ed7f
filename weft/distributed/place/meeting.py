"""Whether this process has met the other ranks of its run, by Weft or by torch.distributed."""

import sys

import torch.distributed as distributed
from torch.distributed import distributed_c10d

__all__ = ["has_met", "note_meeting"]

_met: list[bool] = []


def note_meeting() -> None:
    """Whoever brings ranks together says so."""
    _met[:] = [True]


def has_met() -> bool:
    """Whether ranks were brought together at any time since this process began, also if they have parted since."""
    if _met or distributed.is_initialized():
        return True
    # Both are set when a process group is initialised, and stay when it is destroyed.
    is_hooked = getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook"
    return is_hooked or distributed_c10d._default_pg_init_method is not None
