"""Finding the first tensor of a step that is not finite."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.specs import Batch

__all__ = ["first_bad_activation", "first_bad_of"]


def first_bad_of(kind: str, tensors: Mapping[str, Tensor]) -> str | None:
    """`"parameter layer.weight"` for the first tensor, in the mapping's order, with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            return f"{kind} {name}"
    return None


def is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def first_bad_activation(module: nn.Module, batch: Batch) -> str | None:
    """Run forward once with a hook on every leaf module; name the first whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not found and not is_finite(output):
                found.append(f"output of {name}")

        return hook

    leaves = [(name, m) for name, m in module.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(watch(name or type(m).__name__)) for name, m in leaves]
    try:
        with torch.no_grad():
            module(*batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
