"""Events of a woven script on one rank, as data: what `weft prove`, `simulate` and `profile` see of a loop not theirs.

    weave(...)                           PlanChosen, Woven
    for x, y in loader:                  BatchTaken
        loss = loss_of(model(x), y)      ForwardBegan, ForwardEnded        of each call of a woven model
        loss.backward()                  GradientReady                     of each parameter, before other ranks see it
                                         BackwardEnded, ExchangeEnded      this rank's own part, and that of all
        optimizer.step()                 UpdateBegan, UpdateEnded
    ...                                  ScriptEnded

An observer is any function that takes an event. Hooks are set only where there are observers: a plain run has none.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

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
    "name_models",
    "num_rows",
    "observe",
]


@dataclass(frozen=True)
class PlanChosen:
    """The script is about to weave, by this plan; ranks have not met yet."""

    plan: str


@dataclass(frozen=True)
class Woven:
    """The script has woven, by this plan; models by the beginning of their parameters' names. `traffic` tells what the
    exchange of the last step cost."""

    models: Mapping[str, nn.Module]
    optimizers: tuple[torch.optim.Optimizer, ...]
    plan: str
    traffic: Callable[[], Traffic] = Traffic

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{begin}{name}": parameter
            for begin, model in self.models.items()
            for name, parameter in model.named_parameters()
        }


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
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class UpdateEnded:
    optimizer: torch.optim.Optimizer


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


def name_models(models: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Models by the beginning of their parameters' names, which one alone does not need.

    >>> list(name_models([nn.Linear(1, 1)])), list(name_models([nn.Linear(1, 1), nn.Tanh()]))
    ([''], ['models[0].', 'models[1].'])
    """
    return {f"models[{number}]." if len(models) > 1 else "": model for number, model in enumerate(models)}


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


def observe(
    tell: Observer,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    plan: str,
    traffic: Callable[[], Traffic] = Traffic,
) -> None:
    """Tell of all that these models and optimizers do from now on; `weave` calls it last."""
    woven = Woven(name_models(models), tuple(optimizers), plan, traffic)
    tell(woven)
    for model in models:
        model.register_forward_pre_hook(_forward_began(tell), with_kwargs=True)
        model.register_forward_hook(_forward_ended(tell), with_kwargs=True)
    backward = _Backward(tell)
    for name, parameter in woven.parameters.items():
        if parameter.requires_grad:
            # A hook of the tensor comes before all that wait for the accumulated gradient, as the exchange does.
            parameter.register_hook(backward.hook(name))
    for optimizer in optimizers:
        _observe_updates(tell, optimizer)


class _Backward:
    """One backward after another; kept alive by its hooks."""

    def __init__(self, tell: Observer) -> None:
        self._tell = tell
        self._is_running = False

    def hook(self, name: str) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            if not self._is_running:
                self._is_running = True
                Variable._execution_engine.queue_callback(self._end)
            self._tell(GradientReady(name, gradient))

        return see

    def _end(self) -> None:
        self._is_running = False
        # Queued after the exchange's own, which was queued after this one.
        Variable._execution_engine.queue_callback(lambda: self._tell(ExchangeEnded()))
        self._tell(BackwardEnded())


def _inputs(args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _forward_began(tell: Observer) -> Callable[..., None]:
    return lambda _model, args, kwargs: tell(ForwardBegan(_inputs(args, kwargs)))


def _forward_ended(tell: Observer) -> Callable[..., None]:
    return lambda _model, args, kwargs, _output: tell(ForwardEnded(_inputs(args, kwargs)))


def _observe_updates(tell: Observer, optimizer: torch.optim.Optimizer) -> None:
    """Around `step` as it is now: whatever was put in its place by then is part of it."""
    inner: Any = optimizer.step

    @wraps(inner)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        tell(UpdateBegan(self))
        result = inner(*args, **kwargs)
        tell(UpdateEnded(self))
        return result

    setattr(optimizer, "step", MethodType(step, optimizer))  # noqa: B010 -- mypy knows that a method is no variable
