"""Makes the backend known to torch.distributed, and opens a group when torch asks for one."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.distributed.group.shared_memory import SharedMemoryGroup, StoreRendezvous
from weft.distributed.torch_backend.process_group import BACKEND, WeftProcessGroup

__all__ = ["register"]


def register() -> None:
    """Make `backend="weft"` known to torch.distributed. May be called again."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _open, extended_api=True, devices=["cpu"])


def _open(options: Any, backend_options: Any) -> WeftProcessGroup:
    del backend_options  # there are none
    timeout: timedelta = options.timeout
    rendezvous = StoreRendezvous(options.store)  # torch hands out a new store for every group
    group = SharedMemoryGroup(rendezvous, options.group_rank, options.group_size, timeout=timeout.total_seconds())
    return WeftProcessGroup(group, options.store, timeout)
