"""Events of a woven script on one rank, as data: what `weft prove`, `simulate` and `profile` see of a loop not theirs.

    weave(...)                           PlanChosen, Woven
    for x, y in loader:                  BatchTaken
        loss = loss_of(model(x), y)      ForwardBegan, ForwardEnded        of each call of a woven model
        loss.backward()                  GradientReady                     of each parameter, before other ranks see it
                                         BackwardEnded, ExchangeEnded      this rank's own part, and that of all
        optimizer.step()                 UpdateBegan, UpdateEnded
    ...                                  ScriptEnded

An observer is any function that takes an event. Hooks that tell of them (observing.py) are set only where there are
observers: a plain run has none.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.training.replicas import Traffic
from weft.training.results import hash_tensors

__all__ = [
    "BackwardEnded",
    "BatchTaken",
    "ExchangeEnded",
    "ForwardBegan",
    "ForwardEnded",
    "GradientReady",
    "Observer",
    "PlanChosen",
    "ScriptEnded",
    "ScriptEvent",
    "UpdateBegan",
    "UpdateEnded",
    "Woven",
    "hash_woven",
    "num_rows",
]


@dataclass(frozen=True)
class PlanChosen:
    """The script is about to weave, by this plan; ranks have not met yet."""

    plan: str


@dataclass(frozen=True)
class Woven:
    """The script has woven.

    Args:
        weight: of this rank's part of the batch that was handed out last.
        traffic: what the exchange of the last step cost.
    """

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: Mapping[str, nn.Parameter]
    plan: str
    weight: Callable[[], float] = lambda: 1.0
    traffic: Callable[[], Traffic] = Traffic


@dataclass(frozen=True)
class BatchTaken:
    """A woven loader, or `weft.share`, has handed out this rank's part of a batch."""

    batch: Any


@dataclass(frozen=True)
class ForwardBegan:
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class ForwardEnded:
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class GradientReady:
    """This backward's own part of the gradient, before it is added to anything."""

    name: str
    gradient: Tensor


@dataclass(frozen=True)
class BackwardEnded:
    pass


@dataclass(frozen=True)
class ExchangeEnded:
    """Gradients of synchronous ranks are those of all."""


@dataclass(frozen=True)
class UpdateBegan:
    optimizer: torch.optim.Optimizer | None  # none of a script that updates by hand


@dataclass(frozen=True)
class UpdateEnded:
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class ScriptEnded:
    pass


ScriptEvent = (
    PlanChosen
    | Woven
    | BatchTaken
    | ForwardBegan
    | ForwardEnded
    | GradientReady
    | BackwardEnded
    | ExchangeEnded
    | UpdateBegan
    | UpdateEnded
    | ScriptEnded
)

Observer = Callable[[ScriptEvent], None]


def hash_woven(woven: Iterable[Woven]) -> str:
    """SHA-256 of all parameters, equal exactly when every bit is."""
    own = [one.parameters for one in woven]
    return hash_tensors({f"{i}.{name}": parameter for i, found in enumerate(own) for name, parameter in found.items()})


def num_rows(inputs: Iterable[Tensor]) -> int:
    """The length of the first of a model's inputs that has one.

    >>> num_rows([torch.zeros(()), torch.zeros(3, 2)])
    3
    """
    return next((len(tensor) for tensor in inputs if tensor.dim()), 0)
