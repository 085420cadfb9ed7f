"""Any torch.optim optimizer, as it is."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.errors import UsageError
from weft.training.optimizers.optimizer import (
    AbstractOptimizer,
    OptimizerState,
    Scope,
    Shared,
    WholeNorms,
    slots_beside,
)
from weft.training.optimizers.plain_rule import check_between

__all__ = ["TorchOptimizer", "as_slots", "check_no_closure", "clone_over", "needs_closure", "scope_of"]

ELEMENT_WISE: frozenset[object] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Those of torch.optim whose update of an element depends on no other. Any other class may look at whole tensors, as
Adafactor and Muon do."""


def scope_of(kind: object) -> Scope:
    """Of a class of torch.optim, or of anything else that makes an optimizer."""
    return "element" if kind in ELEMENT_WISE else "tensor"


@final
class TorchOptimizer(AbstractOptimizer):
    """`TorchOptimizer(torch.optim.NAdam, lr=1e-3, weight_decay=0.1)`; the first argument is called as
    `factory(parameters, lr=lr, **options)`.

    Its state is that of torch.optim by parameter name, with numbers as scalar tensors. `update` takes any such state:
    one that it did not return itself (from a checkpoint, say) is written into torch.optim first. What an optimizer
    changes in its parameter groups is not state here; those of torch.optim change nothing there.
    """

    def __init__(self, factory: Callable[..., torch.optim.Optimizer], *, lr: float, **options: Any) -> None:
        check_between(0, math.inf, lr=lr)
        self._factory = factory
        self._lr = lr
        self._options = options
        self._leaves: dict[str, nn.Parameter] = {}  # share memory with the parameters of the last call
        self._inner: torch.optim.Optimizer | None = None
        self._state: OptimizerState | None = None  # what the last call returned

    @property
    def lr(self) -> float:
        return self._lr

    @property
    def scope(self) -> Scope:
        return scope_of(self._factory)

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        self._bind(parameters)
        return self._remember(self._lr, torch.zeros((), dtype=torch.float64))

    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        return parameters

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        inner = self._inner
        if inner is None or state is not self._state or not self._is_bound_to(parameters):
            inner = self._bind(parameters)
            self._load(inner, state)
        for name, leaf in self._leaves.items():
            leaf.grad = gradients.get(name)
        for group in inner.param_groups:
            group["lr"] = lr * group["lr_scale"]
        inner.step()
        inner.zero_grad(set_to_none=True)
        return self._remember(lr, state.shared.step + 1)

    def _bind(self, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """Build the torch optimizer on leaves of its own, so that nobody else sees the gradients put there."""
        self._leaves = {name: nn.Parameter(parameter.detach()) for name, parameter in parameters.items()}
        try:
            inner = self._factory(list(self._leaves.values()), lr=self._lr, **self._options)
        except (TypeError, ValueError) as error:
            raise UsageError(f"torch.optim does not take these options ({self._options}: {error})") from error
        check_no_closure(inner)
        for group in inner.param_groups:
            # A factory may give each group its own learning rate: a schedule scales them all alike.
            group["lr_scale"] = group["lr"] / self._lr if self._lr else 1.0
        self._inner = inner
        return inner

    def _is_bound_to(self, parameters: Mapping[str, Tensor]) -> bool:
        return parameters.keys() == self._leaves.keys() and all(
            leaf.is_set_to(parameters[name]) for name, leaf in self._leaves.items()
        )

    def _load(self, inner: torch.optim.Optimizer, state: OptimizerState) -> None:
        unknown = state.slots.keys() - self._leaves.keys()
        if unknown:
            raise UsageError(f"optimizer state is of another model (unknown parameter: {min(unknown)})")
        for name, slots in state.slots.items():
            if slots:
                leaf = self._leaves[name]
                inner.state[leaf] = {key: value.clone() for key, value in slots_beside(leaf, slots).items()}

    def _remember(self, lr: float, step: Tensor) -> OptimizerState:
        assert self._inner is not None
        shared = Shared(lr=torch.tensor(lr, dtype=torch.float64), step=step)
        values = {name: self._inner.state.get(leaf, {}) for name, leaf in self._leaves.items()}
        self._state = OptimizerState(shared, {name: as_slots(found) for name, found in values.items()})
        return self._state


def as_slots(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """An empty value (SGD's velocity without momentum) is left out; torch.optim takes it for not begun."""
    return {key: _as_tensor(key, value) for key, value in values.items() if value is not None}


def _as_tensor(key: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int):
        return torch.tensor(value)
    raise UsageError(
        f"optimizer keeps state that is neither tensor nor number ({key}: {type(value).__name__}); "
        "choose one whose state can be written to a checkpoint"
    )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it evaluates the loss itself, several times a step, as LBFGS does."""
    given = inspect.signature(type(optimizer).step).parameters.values()
    needed = [one for one in given if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    return len(needed) > 1  # the first is the optimizer


def check_no_closure(optimizer: torch.optim.Optimizer) -> None:
    if needs_closure(optimizer):
        raise UsageError(
            f"optimizer evaluates the loss itself, several times a step (optimizer: {type(optimizer).__name__}); "
            "choose one that takes gradients"
        )


def clone_over(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and attributes over other parameter groups, without state.

    Whatever was hung on the instance stays behind: hooks, and the `step` that a scheduler or `weave` put there.
    """
    clone: torch.optim.Optimizer = object.__new__(type(optimizer))
    clone.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            clone.__dict__[key] = type(value)()
    clone.defaults = dict(optimizer.defaults)
    clone.state = defaultdict(dict)
    clone.param_groups = [dict(group) for group in groups]
    return clone
