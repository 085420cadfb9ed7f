"""Hooks on what a script has woven that tell observers what happens, as events."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.observation.events import (
    BackwardEnded,
    ExchangeEnded,
    ForwardBegan,
    ForwardEnded,
    GradientReady,
    Observer,
    ScriptEvent,
    UpdateBegan,
    UpdateEnded,
    Woven,
)
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.specs import Plan
from weft.training.replicas import AbstractReplicas, Traffic

__all__ = ["observe"]


class Observed(Protocol):
    """The part of a weaving that is observed."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    parameters: dict[str, nn.Parameter]
    plan: Plan
    replicas: AbstractReplicas | None

    @property
    def share(self) -> BatchShare: ...


def observe(tell: Observer, weaving: Observed) -> None:
    """Tell of all that these models and optimizers do from now on; `weave` calls it last."""
    share, replicas = weaving.share, weaving.replicas
    tell = tell if weaving.optimizers else _UpdatesByHand(tell)
    tell(
        Woven(
            weaving.models,
            weaving.optimizers,
            weaving.parameters,
            str(weaving.plan),
            lambda: share.weight,
            Traffic if replicas is None else replicas.traffic,
        )
    )
    for model in weaving.models:
        model.register_forward_pre_hook(_forward_began(tell), with_kwargs=True)
        model.register_forward_hook(_forward_ended(tell), with_kwargs=True)
    backward = _Backward(tell)
    for name, parameter in weaving.parameters.items():
        if parameter.requires_grad:
            # Hooks of the tensor come before all that wait for the accumulated gradient, as the exchange does; this one
            # before those that scale it.
            hook = parameter.register_hook(backward.hook(name))
            hooks: Any = parameter._backward_hooks
            hooks.move_to_end(hook.id, last=False)
    for optimizer in weaving.optimizers:
        _observe_updates(tell, optimizer)


class _UpdatesByHand:
    """Of a script without an optimizer: an update is all that lies between a backward and the next forward."""

    def __init__(self, tell: Observer) -> None:
        self._tell = tell
        self._is_updating = False

    def __call__(self, event: ScriptEvent) -> None:
        if isinstance(event, ForwardBegan) and self._is_updating and torch.is_grad_enabled():
            self._is_updating = False
            self._tell(UpdateEnded(None))
        self._tell(event)
        if isinstance(event, ExchangeEnded):
            self._is_updating = True
            self._tell(UpdateBegan(None))


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
    return OwnHook(lambda _model, args, kwargs: tell(ForwardBegan(_inputs(args, kwargs))))


def _forward_ended(tell: Observer) -> Callable[..., None]:
    return OwnHook(lambda _model, args, kwargs, _output: tell(ForwardEnded(_inputs(args, kwargs))))


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
