"""Proofs as data: traces of trainings, what a comparison of them found, and in words what it shows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.graph import relative_error
from weft.specs import CPU
from weft.training.optimizers import OptimizerState

__all__ = [
    "Proof",
    "TensorComparison",
    "Trace",
    "are_equal",
    "clone",
    "compare_all",
    "copy_of",
    "copy_to_host",
    "error_of",
    "failed",
    "pack_trace",
    "unpack_trace",
]

Trace = list[dict[str, Tensor]]
"""The parameters and the optimizer's slots after each step; of synchronous ranks also the loss, and the gradients.

Slots, because parameters alone do not tell all: Adam takes the same step for a gradient as for twice that gradient.
"""


@dataclass(frozen=True)
class Proof:
    """The finding of a comparison. `largest_error` is relative to the largest value of its tensor."""

    passed: bool
    is_bitwise: bool
    num_steps: int
    largest_error: float
    tolerance: float
    finding: str  # in words: what was shown, or the first difference and where it is


def failed(finding: str, num_steps: int, tolerance: float, largest: float = float("inf")) -> Proof:
    return Proof(False, False, num_steps, largest, tolerance, finding)


@dataclass(frozen=True)
class TensorComparison:
    """Tensors that were found against those that were expected; `off` tells the first that is not within tolerance."""

    largest: float
    is_bitwise: bool
    off: str = ""

    @property
    def how(self) -> str:
        return "to the last bit" if self.is_bitwise else f"to {self.largest:.2g} of each tensor's largest value"


def compare_all(
    held: Iterable[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]], tolerance: float
) -> TensorComparison:
    """The first tensor that is off, or how far the furthest is.

    Args:
        held: where, what was found and what was expected.
    """
    largest, is_bitwise = 0.0, True
    for where, found, expected in held:
        for name, tensor in expected.items():
            own, tensor = found[name].cpu(), tensor.cpu()  # a reference is where it was computed
            is_bitwise = is_bitwise and torch.equal(own, tensor)
            error, place = error_of(own, tensor)
            largest = max(largest, error)
            if not error <= tolerance:
                return TensorComparison(
                    largest, False, f"{where}{name}{place} is off by {error:.3g} of its largest value"
                )
    return TensorComparison(largest, is_bitwise)


def error_of(found: Tensor, expected: Tensor) -> tuple[float, str]:
    """The largest difference over the largest value, and the index where it is; what is not finite proves nothing."""
    return relative_error(found, expected) if bool(expected.isfinite().all()) else (float("inf"), "")


def are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether two sets of named tensors are the same to the last bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def copy_of(parameters: Mapping[str, Tensor], optimizer: OptimizerState) -> dict[str, Tensor]:
    """Copies of parameters and slots in host memory, as a trace holds them for each step."""
    slots = {f"{name} ({slot})": tensor for name, own in optimizer.slots.items() for slot, tensor in own.items()}
    return copy_to_host({**parameters, **slots})


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to(CPU, copy=True) for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def pack_trace(trace: Trace) -> dict[str, Tensor]:
    """One flat set of named tensors, as a rank leaves it in a file."""
    return {f"{step}/{name}": tensor for step, found in enumerate(trace) for name, tensor in found.items()}


def unpack_trace(tensors: Mapping[str, Tensor]) -> Trace:
    """The inverse of `pack_trace`; tensors of other names are left out."""
    trace: Trace = []
    for key, tensor in tensors.items():
        step, _, name = key.partition("/")
        if step.isdecimal():
            trace += [{} for _ in range(int(step) + 1 - len(trace))]
            trace[int(step)][name] = tensor
    return trace
