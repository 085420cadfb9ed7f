"""A script's own torch.optim optimizer under a sharded placement: it keeps state for this rank's pieces alone.

backward       p.grad is whole on every rank: clipping, scaling and looking at it work as they are
step           the optimizer sees pieces in the place of parameters, updates them, and keeps their state
after it       pieces are gathered, and every rank has the whole model again
"""

from collections.abc import Mapping
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.distributed.codecs import Piece
from weft.errors import PlanError, UsageError
from weft.training.checkpoint import Cut
from weft.training.optimizers.torch_optimizer import scope_of
from weft.training.placement import AbstractPlacement

__all__ = ["TorchSteps", "check_cuttable", "find_steps"]

_steps: "WeakKeyDictionary[torch.optim.Optimizer, TorchSteps]" = WeakKeyDictionary()


def find_steps(optimizer: torch.optim.Optimizer) -> "TorchSteps | None":
    """Those of an optimizer that a placement has taken over; None of any other."""
    return _steps.get(optimizer)


@final
class TorchSteps:
    """Puts pieces in the place of parameters while the optimizer steps; kept alive by the optimizer's own hooks.

    Outside of `step` the groups of the optimizer hold the model's parameters, so that `zero_grad`, schedulers and
    gradient scalers find what they know.

    Args:
        pieces: of the parameters, by name, that the placement owns.

    Raises:
        PlanError: the optimizer may need whole tensors.
    """

    def __init__(
        self,
        placement: AbstractPlacement,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        pieces: Mapping[str, Piece],
    ) -> None:
        check_cuttable(optimizer)
        self._placement = placement
        self._parameters = parameters
        self._pieces = pieces
        owned = placement.owned(parameters).items()
        self._leaves = {name: nn.Parameter(own, parameters[name].requires_grad) for name, own in owned}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._whole: list[list[Any]] = []  # the groups' parameters, while pieces stand in their place
        self._cut_state(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_post_hook(self._cut_state)
        _steps[optimizer] = self

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
        """The state that this rank keeps of a parameter: of its piece, or none. `load_state_dict` takes it as well as
        that of the whole."""
        own = self._stand_in(parameter)
        return {} if own is None else optimizer.state.get(own, {})

    def cut_of(self, parameter: Tensor) -> Cut | None:
        """The part that state of the parameter's shape is on this rank; None for all of it."""
        name = self._names.get(parameter)
        return None if name is None else self._placement.cut_of(f"slot/{name}/")

    def _cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """State that the optimizer has already, of whole parameters, becomes that of pieces."""
        for parameter, name in self._names.items():
            state = optimizer.state.pop(parameter, None)
            if state is not None and name in self._leaves:
                piece = self._pieces[name]
                optimizer.state[self._leaves[name]] = {
                    key: piece.of(value).clone() if _is_like(value, parameter) else value
                    for key, value in state.items()
                }

    def _before(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(given is not None for given in (*arguments[1:], options.get("closure"))):  # the first is the optimizer
            raise UsageError(
                "closure would compute gradients inside of step, where pieces stand for parameters (plan: shard); "
                "call backward before step()"
            )
        self._put_back(optimizer)  # what a step that failed has left
        for name, leaf in self._leaves.items():
            parameter, piece = self._parameters[name], self._pieces[name]
            leaf.data = piece.of(parameter.detach())  # whose memory may be another since the last step
            leaf.grad = None if parameter.grad is None else piece.of(parameter.grad)
        self._whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [own for own in map(self._stand_in, group["params"]) if own is not None]

    def _stand_in(self, parameter: Any) -> Any:
        """This rank's piece; None where it has none. A parameter that is not the model's is left as it is."""
        name = self._names.get(parameter)
        return parameter if name is None else self._leaves.get(name)

    def _after(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        self._put_back(optimizer)
        for leaf in self._leaves.values():
            leaf.grad = None
        self._placement.spread(self._parameters)

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        for group, whole in zip(optimizer.param_groups, self._whole, strict=False):
            group["params"] = whole
        self._whole = []


def check_cuttable(optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for one that may need whole tensors."""
    kind = type(optimizer)
    if scope_of(kind) != "element":
        raise PlanError(
            f"optimizer may need whole tensors, and shards hold pieces (optimizer: {kind.__name__}); "
            "use an element-wise one of torch.optim, or data=N"
        )


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0


def _refuse_state_dict(_optimizer: torch.optim.Optimizer) -> None:
    raise UsageError(
        "state of the optimizer lies in pieces on several ranks (plan: shard); "
        "save it with weft.save(path, optimizer=optimizer), which every rank calls"
    )
