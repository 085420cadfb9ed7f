"""The facts on which ranks must agree when a script weaves its models and optimizers, one after another, as text."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

__all__ = ["describe_woven"]


def describe_woven(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], **settings: object
) -> dict[str, str]:
    """Parameters, buffers, optimizers and their groups, in order, and the settings of the call.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> for name, value in describe_woven([model], [optimizer], plan="data=2").items():
    ...     print(f"{name}: {value[:42]}")
    plan: data=2
    parameter weight: float32 (1, 2)
    optimizer: SGD
    group 0 of the optimizer, parameters: weight
    group 0 of the optimizer, settings: dampening=0, differentiable=False, foreach
    """
    facts = {name: str(value) for name, value in settings.items()}
    names = dict[int, str]()
    for number, model in enumerate(models):
        prefix = f"{number}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)] = f"{prefix}{name}"
            facts[f"parameter {prefix}{name}"] = _describe(parameter) + ("" if parameter.requires_grad else ", frozen")
        for name, buffer in model.named_buffers(remove_duplicate=False):
            facts[f"buffer {prefix}{name}"] = _describe(buffer)
    for number, optimizer in enumerate(optimizers):
        facts |= dict(_facts_of(f"optimizer {number}" if len(optimizers) > 1 else "optimizer", optimizer, names))
    return facts


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _facts_of(title: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[tuple[str, str]]:
    yield title, type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        of = "of the optimizer" if title == "optimizer" else f"of {title}"
        own = [names.get(id(parameter), "one of no woven model") for parameter in group["params"]]
        yield f"group {number} {of}, parameters", ", ".join(own)
        settings = sorted((name, value) for name, value in group.items() if name != "params")
        yield f"group {number} {of}, settings", ", ".join(f"{name}={_plain(value)}" for name, value in settings)


def _plain(value: object) -> str:
    """The same on all ranks for the same setting: a tensor may lie on another device, and a function has an address."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    return getattr(value, "__qualname__", None) or str(value)
