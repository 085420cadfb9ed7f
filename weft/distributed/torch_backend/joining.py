"""How scripts that join through torch.distributed find it: PyTorch's own, Accelerate's, Trainers.

They join by RANK and its like, which the launcher sets. Two things they cannot know from those.
"""

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from weft.distributed.torch_backend.registration import register

__all__ = ["VARIABLE", "use_torch_backend"]

VARIABLE = "WEFT_TORCH_BACKEND"


@contextmanager
def use_torch_backend(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Around a script: `backend="weft"` is known, and Accelerate trains ranks without an accelerator together.

    Accelerate initialises a group on a CPU only when it is told to use that; else each rank trains a copy of its own.
    It lets nobody choose another backend than Gloo there, but takes a group that is initialised already: where
    WEFT_TORCH_BACKEND names a backend, that is so before the script begins.
    """
    register()
    if not torch.accelerator.is_available():
        environment.setdefault("ACCELERATE_USE_CPU", "true")
    is_rank = int(environment.get("RANK", "0")) < int(environment.get("WORLD_SIZE", "1"))  # and not a server
    backend = environment.get(VARIABLE, "") if is_rank else ""
    if backend:
        dist.init_process_group(backend)
    try:
        yield
    finally:
        if backend and dist.is_initialized():
            dist.destroy_process_group()
