"""Where all of a script's random numbers come from: torch's generators, Python's and NumPy's, as values."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.distributed.script.saving.structure import take_apart

__all__ = ["draw_random_for", "read_random", "write_random"]


def read_random() -> dict[str, Any]:
    """The state of every generator that a script draws from without naming it."""
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {"name": name, "keys": keys, "place": place, "has_gauss": has_gauss, "cached": cached},
    }
    if (device := torch.accelerator.current_accelerator()) and torch.accelerator.is_available():
        state["accelerator"] = {"type": device.type, "state": torch.get_device_module(device).get_rng_state()}
    return state


def write_random(state: dict[str, Any]) -> None:
    """Go on drawing from a state. That of an accelerator that is not this one's is passed over: generators of different
    devices do not understand each other."""
    torch.set_rng_state(state["torch"])
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state((numpy["name"], numpy["keys"], numpy["place"], numpy["has_gauss"], numpy["cached"]))
    found, device = state.get("accelerator"), torch.accelerator.current_accelerator()
    if found and device and torch.accelerator.is_available() and found["type"] == device.type:
        torch.get_device_module(device).set_rng_state(found["state"])


def draw_random_for(rank: int, state: dict[str, Any]) -> None:
    """Begin a rank that a checkpoint does not know, by rank 0's state in it: the same every time, and unlike any other
    rank."""
    digest = hashlib.sha256(f"rank {rank}".encode())
    for tensor in take_apart("", state).tensors.values():
        digest.update(_bytes_of(tensor))
    seed = int.from_bytes(digest.digest()[:8]) >> 1  # torch takes signed numbers
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
