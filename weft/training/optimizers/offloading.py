"""Optimizer state in memory that a disk backs: the kernel writes its pages out when other memory is short.

    update of w      disk [m v]  -->  memory [m v]  --> rule --> memory [m' v']  -->  disk, in place
                                     one parameter at a time, so that no more than its slots is in memory by need

A slot is a file without a name in a temporary folder: its space is free again when the process ends, in whatever way.
"""

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import StorageError
from weft.training.optimizers.optimizer import OptimizerState, Slots, WholeNorms
from weft.training.optimizers.rule_optimizer import Optimizer
from weft.training.optimizers.wrapper import AbstractOptimizerWrapper

__all__ = ["LEAST_BYTES", "OffloadedOptimizer", "is_on_disk", "map_on_disk", "move_state_to_disk", "move_to_disk"]

LEAST_BYTES = mmap.PAGESIZE
"""Smaller tensors stay in memory: a file takes whole pages."""


def map_on_disk(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros in a file of their own, reserved at once: a disk that is full is found here, not when a page is written.

    Raises:
        StorageError: there is no room for it.
    """
    num_bytes = shape.numel() * dtype.itemsize
    folder = _folder()
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="weft-slot-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        what = f"folder: {folder}, bytes: {num_bytes}: {error.strerror}"
        raise StorageError(f"disk has no room for optimizer state ({what}); set TMPDIR to one that has") from error
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _folder() -> Path:
    """TMPDIR if it is set; else /var/tmp, which is on a disk where /tmp may be in memory."""
    given = os.environ.get("TMPDIR")
    on_disk = Path("/var/tmp")
    return on_disk if given is None and os.access(on_disk, os.W_OK) else Path(tempfile.gettempdir())


def is_on_disk(tensor: Tensor) -> bool:
    return getattr(tensor, "_weft_is_on_disk", False)


@torch.no_grad()
def move_to_disk(tensor: Tensor) -> Tensor:
    """The same tensor, in memory that a disk backs; where it is small, or on another device, as it was."""
    if is_on_disk(tensor) or tensor.nbytes < LEAST_BYTES or tensor.device.type != "cpu":
        return tensor
    mapped = map_on_disk(tensor.shape, tensor.dtype).copy_(tensor)
    tensor.set_(mapped)  # type: ignore[call-overload]  # whoever has it writes on in place
    tensor._weft_is_on_disk = True  # type: ignore[attr-defined]
    return tensor


def move_state_to_disk(optimizer: torch.optim.Optimizer) -> None:
    """After a step: what the optimizer has made anew. It updates in place."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                move_to_disk(value)


@final
class OffloadedOptimizer(AbstractOptimizerWrapper):
    """Keeps the slots of another optimizer on disk."""

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        slots: dict[str, Slots] = {}
        if not isinstance(self._inner, Optimizer):
            return self._inner.init(parameters)  # torch.optim makes its state in the first step
        for name, parameter in parameters.items():
            slots[name] = _all_to_disk(self._inner.init({name: parameter}).slots[name])
        return OptimizerState(self._inner.init({}).shared, slots)

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        if not isinstance(self._inner, Optimizer):
            after = self._inner.update(gradients, parameters, state, lr, whole_norms)
            for own in after.slots.values():
                _all_to_disk(own)  # once: torch.optim updates in place
            return after
        if self._inner.scope == "layer":  # one message for the norms of all
            after = self._inner.update(gradients, parameters, state, lr, whole_norms)
            return OptimizerState(after.shared, {n: _write_over(state.slots[n], s) for n, s in after.slots.items()})
        slots = dict(state.slots)
        for name in parameters:
            if gradients.get(name) is not None:
                before = OptimizerState(state.shared, {name: slots[name]})
                found = self._inner.update({name: gradients[name]}, {name: parameters[name]}, before, lr)
                slots[name] = _write_over(slots[name], found.slots[name])
        return OptimizerState(self._inner.update({}, {}, state, lr).shared, slots)


def _all_to_disk(slots: Slots) -> Slots:
    return {key: move_to_disk(tensor) for key, tensor in slots.items()}


@torch.no_grad()
def _write_over(old: Slots, new: Slots) -> Slots:
    """Into the memory of the slots before it, which a checkpoint may have brought."""
    found: dict[str, Any] = {}
    for key, tensor in new.items():
        held = old.get(key)
        is_same = held is not None and is_on_disk(held) and held.shape == tensor.shape
        found[key] = held.copy_(tensor) if held is not None and is_same else move_to_disk(tensor)
    return found
