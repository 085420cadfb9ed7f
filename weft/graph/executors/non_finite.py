"""Finding the first tensor of a step that is not finite."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.specs import Batch

__all__ = ["first_bad_in_forward", "first_bad_of"]


def first_bad_of(kind: str, tensors: Mapping[str, Tensor]) -> str | None:
    """`"parameter layer.weight"` for the first tensor, in the mapping's order, with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            return f"{kind} {name}"
    return None


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def first_bad_in_forward(module: nn.Module, batch: Batch) -> str | None:
    """Run forward once, and name the first bad tensor as it is touched: a module's own parameters and buffers when
    it begins, its output when it ends.

    The order matters: a layer that overflows spoils the running statistics of those behind it, not the reverse.
    """
    found: list[str] = []

    def note(bad: str | None) -> None:
        if bad is not None:
            found.append(bad)

    handles = [
        handle
        for name, part in module.named_modules()
        for handle in (
            part.register_forward_pre_hook(_watch_own(name, note)),
            part.register_forward_hook(_watch_output(name or type(part).__name__, note)),
        )
    ]
    try:
        with torch.no_grad():
            module(*batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _watch_own(name: str, note: Callable[[str | None], None]) -> Callable[..., None]:
    prefix = f"{name}." if name else ""

    def hook(part: nn.Module, _inputs: Any) -> None:
        note(first_bad_of("parameter", {prefix + n: t for n, t in part.named_parameters(recurse=False)}))
        note(first_bad_of("buffer", {prefix + n: t for n, t in part.named_buffers(recurse=False)}))

    return hook


def _watch_output(name: str, note: Callable[[str | None], None]) -> Callable[..., None]:
    def hook(_part: nn.Module, _inputs: Any, output: Any) -> None:
        note(f"output of {name}" if not all(map(is_finite, _tensors_in(output))) else None)

    return hook


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors_in(item)
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors_in(item)
