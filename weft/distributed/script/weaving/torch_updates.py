"""A script's own optimizers of torch.optim where a plan makes updates: on a rank, or on a shard of its servers.

rank     the optimizer itself, on the model's parameters, with the step that the class has
shard    one of the same class, attributes and parameter groups over the shard's pieces; what the script changes in its
         groups on the way (a scheduler's learning rate, momentum, betas) comes as text with every push
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.distributed.codecs import Piece
from weft.distributed.consistency.server.tuning import AbstractTunedOptimizer
from weft.errors import PlanError
from weft.training.optimizers import AbstractOptimizer, OptimizerState, Scope, Shared, WholeNorms
from weft.training.optimizers.torch_optimizer import as_slots, clone_over, needs_closure, scope_of

__all__ = ["OwnUpdates", "ShardUpdates", "changes_of", "settings_of_groups", "write_slots"]

Optimizers = Sequence[torch.optim.Optimizer]
Settings = list[list[dict[str, Any]]]
"""By optimizer and group, what it is set to."""


def settings_of_groups(optimizers: Optimizers) -> Settings:
    """Numbers, words and pairs of numbers of every group; tensors that hold a number, as that."""
    return [[_plain(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value.item() if _is_number(value) else value for key, value in group.items() if key != "params"}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items() if _is_plain(v)}


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def changes_of(settings: Settings, before: Settings) -> str | None:
    """The settings that differ from `before`, as JSON: rows of optimizer, group, key and value; None if none does.

    >>> changes_of([[{"lr": 0.1, "betas": [0.9, 0.99]}]], [[{"lr": 0.2, "betas": [0.9, 0.99]}]])
    '[[0, 0, "lr", 0.1]]'
    """
    rows = [
        [i, j, key, value]
        for i, groups in enumerate(settings)
        for j, group in enumerate(groups)
        for key, value in group.items()
        if key not in before[i][j] or before[i][j][key] != value
    ]
    return json.dumps(rows) if rows else None


def joint_scope(optimizers: Optimizers) -> Scope:
    """That of all together."""
    return "element" if all(scope_of(type(optimizer)) == "element" for optimizer in optimizers) else "tensor"


@final
class OwnUpdates(AbstractOptimizer):
    """The optimizers themselves, one of which steps at a time, on the parameters that they have. The learning rate is
    the script's affair: the one that is given, 1, is not looked at.

    Args:
        names: of the parameters of each optimizer.
    """

    def __init__(self, optimizers: Optimizers, names: Sequence[Mapping[str, Tensor]]) -> None:
        self._optimizers = optimizers
        self._names = names
        self._step: Callable[[], object] = lambda: None  # of the optimizer whose turn it is
        self._turn = 0
        self._state = self._remember(torch.zeros((), dtype=torch.float64))

    @property
    def lr(self) -> float:
        return 1.0

    @property
    def scope(self) -> Scope:
        return joint_scope(self._optimizers)

    @property
    def state(self) -> OptimizerState:
        """As the last update left it."""
        return self._state

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        return self._state

    def read(self) -> OptimizerState:
        """As the optimizers have it now."""
        self._state = self._remember(self._state.shared.step)
        return self._state

    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        return parameters

    def take_turn(self, index: int, step: Callable[[], object]) -> None:
        """The optimizer with this number makes the next update, by calling `step`."""
        self._turn, self._step = index, step

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        for name in self._names[self._turn]:  # gradients of the other optimizers wait for their own turns
            parameter = parameters.get(name)
            gradient = gradients.get(name)
            if parameter is not None and gradient is not parameter.grad:
                parameter.grad = gradient
        self._step()
        self._state = self._remember(state.shared.step + 1)
        return self._state

    def adopt(self, state: OptimizerState) -> None:
        """Take up a state that others had a part in.

        Raises:
            PlanError: an optimizer has more than slots, which nobody can take a mean of.
        """
        for optimizer in self._optimizers:
            if needs_closure(optimizer):
                about = type(optimizer).__name__
                raise PlanError(f"state of the optimizer has no mean over ranks (optimizer: {about}); use state=keep")
        self._state = state
        for optimizer, own in zip(self._optimizers, self._names, strict=True):
            for name, parameter in own.items():
                write_slots(optimizer, parameter, state.slots.get(name, {}))

    def _remember(self, step: Tensor) -> OptimizerState:
        shared = Shared(lr=torch.ones((), dtype=torch.float64), step=step)
        slots = {
            name: as_slots({key: v for key, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, list)})
            for optimizer, own in zip(self._optimizers, self._names, strict=True)
            for name, parameter in own.items()
        }
        return OptimizerState(shared, slots)


@torch.no_grad()
def write_slots(optimizer: torch.optim.Optimizer, parameter: Tensor, slots: Mapping[str, Tensor]) -> None:
    """State by names, into torch.optim's; a number that it keeps stays a number."""
    own = optimizer.state[parameter] if slots else {}
    for key, value in slots.items():
        known = own.get(key)
        if isinstance(known, Tensor) and known.shape == value.shape:
            known.copy_(value)
        elif isinstance(known, int | float):
            own[key] = type(known)(value.item())
        else:
            own[key] = value.clone() if not value.dim() else value.to(parameter.device, copy=True)


@final
class ShardUpdates(AbstractTunedOptimizer):
    """The optimizers over the pieces of one shard, which go by their numbers. A learning rate that is given scales
    those of the groups.

    Args:
        names: of the parameters of each optimizer.
        pieces: of the shard.
    """

    def __init__(self, optimizers: Optimizers, names: Sequence[Mapping[str, Tensor]], pieces: Sequence[Piece]) -> None:
        self._before = settings_of_groups(optimizers)
        self._pieces = {piece.name: (str(index), piece) for index, piece in enumerate(pieces)}
        self._leaves: dict[str, nn.Parameter] = {}  # share memory with the pieces of the last call
        self._inner: list[torch.optim.Optimizer] = []
        for optimizer, own in zip(optimizers, names, strict=True):
            self._inner.append(self._clone(optimizer, own))
        self._lrs: list[list[float]] = [[float(group["lr"]) for group in one.param_groups] for one in self._inner]
        self._initial = self._remember(torch.zeros((), dtype=torch.float64)).slots
        self._state: OptimizerState | None = None  # what the last call returned

    def _clone(self, optimizer: torch.optim.Optimizer, own: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        """With the state that the script's has already, of this shard's pieces."""
        named = {id(parameter): name for name, parameter in own.items() if name in self._pieces}
        found = {key: self._pieces[name] for key, name in named.items()}
        for parameter in own.values():
            if id(parameter) in found:
                index, piece = found[id(parameter)]
                self._leaves[index] = nn.Parameter(torch.empty(0, dtype=parameter.dtype))
        groups = [
            {**group, "params": [self._leaves[found[id(p)][0]] for p in group["params"] if id(p) in found]}
            for group in optimizer.param_groups
        ]
        clone = clone_over(
            optimizer, [{**group, "capturable": False} if "capturable" in group else group for group in groups]
        )
        for parameter in own.values():
            if id(parameter) in found and parameter in optimizer.state:
                index, piece = found[id(parameter)]
                clone.state[self._leaves[index]] = {
                    key: _cut(value, piece, parameter) for key, value in optimizer.state[parameter].items()
                }
        return clone

    @property
    def lr(self) -> float:
        return 1.0

    @property
    def scope(self) -> Scope:
        return joint_scope(self._inner)

    def tune(self, settings: str | None) -> None:
        rows = {(i, j, key): value for i, j, key, value in json.loads(settings or "[]")}
        for i, (optimizer, groups) in enumerate(zip(self._inner, self._before, strict=True)):
            for j, (group, before) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                values = {key: rows.get((i, j, key), value) for key, value in before.items() if key in group}
                values |= {key: value for (x, y, key), value in rows.items() if (x, y) == (i, j)}
                for key, value in values.items():
                    if key != "capturable":
                        group[key] = tuple(value) if isinstance(value, list) else value
                self._lrs[i][j] = float(group["lr"])

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        shared = Shared(lr=torch.ones((), dtype=torch.float64), step=torch.zeros((), dtype=torch.float64))
        slots = {name: {key: slot.clone() for key, slot in own.items()} for name, own in self._initial.items()}
        return OptimizerState(shared, {name: slots.get(name, {}) for name in parameters})

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
        if state is not self._state:
            self._load(state)
        for name, leaf in self._leaves.items():
            if not leaf.is_set_to(parameters[name]):
                leaf.data = parameters[name]
            leaf.grad = gradients.get(name)
        for optimizer, own in zip(self._inner, self._lrs, strict=True):
            for group, base in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = base * lr
            if any(leaf.grad is not None for group in optimizer.param_groups for leaf in group["params"]):
                optimizer.step()
        for leaf in self._leaves.values():
            leaf.grad = None
        self._state = self._remember(state.shared.step + 1)
        return self._state

    def _load(self, state: OptimizerState) -> None:
        for optimizer in self._inner:
            optimizer.state.clear()
            own = {leaf for group in optimizer.param_groups for leaf in group["params"]}
            for name, leaf in self._leaves.items():
                if leaf in own and state.slots.get(name):
                    optimizer.state[leaf] = {key: value.clone() for key, value in state.slots[name].items()}

    def _remember(self, step: Tensor) -> OptimizerState:
        shared = Shared(lr=torch.ones((), dtype=torch.float64), step=step)
        slots: dict[str, Any] = {name: {} for name in self._leaves}
        for optimizer in self._inner:
            for name, leaf in self._leaves.items():
                if leaf in optimizer.state:
                    slots[name] = as_slots(optimizer.state[leaf])
        return OptimizerState(shared, slots)


def _cut(value: Any, piece: Piece, parameter: Tensor) -> Any:
    """The piece's part of a value of the whole parameter's state; a counter as it is."""
    if not isinstance(value, Tensor):
        return value
    is_like = value.shape == parameter.shape and value.dim() > 0
    return (piece.of(value) if is_like else value).cpu().clone()
