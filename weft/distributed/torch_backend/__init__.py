"""The shared-memory group as a torch.distributed backend, `backend="weft"`, which carries DDP, FSDP2 and DTensor."""

from weft.distributed.torch_backend.joining import use_torch_backend
from weft.distributed.torch_backend.process_group import BACKEND
from weft.distributed.torch_backend.registration import register

__all__ = ["BACKEND", "register", "use_torch_backend"]
