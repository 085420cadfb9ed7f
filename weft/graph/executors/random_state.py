"""Random states of a device: what dropout and its like draw from, kept and put back as one tensor of bytes.

    on the CPU             [ generator of the CPU ]
    on an accelerator      [ generator of the CPU | generator of the device ]

Layers draw where their tensors are. But a module may well draw on the CPU and move what it drew, so a step on an
accelerator has two generators, and both begin from its own state.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.specs import CPU

__all__ = [
    "fit_random_state",
    "fold_random_state",
    "get_random_state",
    "seed_random_state",
    "set_random_state",
    "use_random_state",
]


def seed_random_state(seed: int, device: torch.device = CPU) -> Tensor:
    """The state of generators that were given this seed."""
    own = torch.Generator().manual_seed(seed).get_state()
    if device.type == "cpu":
        return own
    before = get_random_state(device)
    module = torch.get_device_module(device)
    with torch.accelerator.device_index(device.index):
        module.manual_seed(seed)
    seeded = module.get_rng_state(device)
    set_random_state(before, device)
    return torch.cat([own, seeded])


def fold_random_state(state: Tensor, number: int, device: torch.device = CPU) -> Tensor:
    """The state of generators of its own for part `number` of a step that begins with `state`: whoever computes the
    part, in whatever order, draws the same. What follows the step begins with number -1."""
    digest = hashlib.sha256(state.numpy().tobytes() + number.to_bytes(8, "big", signed=True)).digest()
    return seed_random_state(int.from_bytes(digest[:7], "big"), device)


def get_random_state(device: torch.device = CPU) -> Tensor:
    """The state of the generators that a step on the device draws from."""
    own = torch.get_rng_state()
    if device.type == "cpu":
        return own
    return torch.cat([own, torch.get_device_module(device).get_rng_state(device)])


def set_random_state(state: Tensor, device: torch.device = CPU) -> None:
    """Go on drawing from a state of this kind of device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size])
    torch.get_device_module(device).set_rng_state(state[size:], device)


def fit_random_state(found: Tensor, fresh: Tensor) -> Tensor:
    """A state from elsewhere where it is of the same kind of device, else the fresh one: generators of different
    devices do not understand each other, and what is drawn on another one is new in any case."""
    return found if found.shape == fresh.shape else fresh


@contextmanager
def use_random_state(state: Tensor, device: torch.device = CPU) -> Iterator[None]:
    """Draw from a state inside the block; the generators of the process are then as they were."""
    before = get_random_state(device)
    set_random_state(state, device)
    try:
        yield
    finally:
        set_random_state(before, device)
