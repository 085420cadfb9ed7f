"""Devices: which one a rank computes on, from what was wished for and what this machine has."""

import torch

from weft.errors import UsageError

__all__ = ["CPU", "find_device", "list_devices"]

CPU = torch.device("cpu")


def find_device(wish: str = "auto", local_rank: int = 0) -> torch.device:
    """The device that a wish means for one process of a host.

    Args:
        wish: `auto` for the accelerator that torch sees, or else the CPU; `cpu`; a kind, such as `cuda`; or one device,
            such as `cuda:1`, which all processes of a host then share.
        local_rank: the number of this process on its host: of a kind with several devices, ranks take one each, and go
            round again where there are more ranks than devices.

    Raises:
        UsageError: this machine has no such device.

    >>> find_device("cpu", local_rank=1)
    device(type='cpu')
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wish == "cpu" or (wish == "auto" and accelerator is None):
        return CPU
    kind, colon, index = wish.partition(":")
    count = 0 if accelerator is None else torch.accelerator.device_count()
    is_here = accelerator is not None and kind in ("auto", accelerator.type)
    is_fit = not colon or (kind != "auto" and index.isdecimal() and int(index) < count)
    if accelerator is None or not (is_here and is_fit):
        raise UsageError(f"no such device (device: {wish}, here: {', '.join(list_devices())}); choose one, or auto")
    return torch.device(accelerator.type, int(index) if colon else local_rank % count)


def list_devices() -> tuple[str, ...]:
    """The devices of this machine: the CPU, and each device of its accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ("cpu",)
    return ("cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())))
