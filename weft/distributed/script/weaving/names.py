"""Names for the parameters and buffers of several models, and the parameters of each optimizer."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from weft.errors import UsageError

__all__ = ["name_buffers", "name_parameters", "parameters_of", "prefix_of"]

TensorT = TypeVar("TensorT", bound=Tensor)


def prefix_of(index: int, num_models: int) -> str:
    """Of the names of a model: of several each has its number, one alone has none.

    >>> prefix_of(0, 1), prefix_of(1, 2)
    ('', '1.')
    """
    return f"{index}." if num_models > 1 else ""


def name_parameters(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Each once, also where models share it."""
    return _once([(prefix_of(i, len(models)), dict(model.named_parameters())) for i, model in enumerate(models)])


def name_buffers(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return _once([(prefix_of(i, len(models)), dict(model.named_buffers())) for i, model in enumerate(models)])


def _once(found: Sequence[tuple[str, Mapping[str, TensorT]]]) -> dict[str, TensorT]:
    named, known = dict[str, TensorT](), set[int]()
    for prefix, tensors in found:
        for name, tensor in tensors.items():
            if id(tensor) not in known:
                known.add(id(tensor))
                named[prefix + name] = tensor
    return named


def parameters_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the woven models that an optimizer updates, by name, in the models' order.

    Raises:
        UsageError: it updates others too.
    """
    own = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in parameters.items() if id(parameter) in own}
    others = [parameter for key, parameter in own.items() if key not in set(map(id, found.values()))]
    if others:
        about = f"{type(optimizer).__name__}: {len(others)}, the first of shape {tuple(others[0].shape)}"
        raise UsageError(
            f"optimizer updates parameters that no woven model has ({about}), which would drift apart; "
            "give weave all models: weave([a, b], ...)"
        )
    return found
