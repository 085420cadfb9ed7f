"""The optimizer seam: Deep500's three steps as pure functions on tensors.

    new_input       once per step        the shared state moves on (step counter)
    prepare_param   before the gradient  the point at which the gradient is taken
    update_rule     after the gradient   (gradient, parameter, slots) -> (parameter, slots)

A rule never writes to a tensor it was given and keeps nothing between calls, so any consistency scheme can run it
where and when it likes (on a server, on a shard, late), and a graph can capture it. Learning rate and step are
tensors in the shared state for the same reason.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

__all__ = [
    "AbstractOptimizer",
    "AbstractRule",
    "OptimizerState",
    "Scope",
    "Shared",
    "Slots",
    "WholeNorms",
    "slots_beside",
]

Slots = Mapping[str, Tensor]
"""The memory of an optimizer for one parameter, by name: `velocity`, `second_moment`."""

Scope = Literal["element", "layer", "tensor"]
"""Whether a rule may run on any cut of a tensor, needs norms of whole tensors besides (LARS, LAMB), or whole ones."""

WholeNorms = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""From the L2 norms of pieces, by the names of their tensors two for each (of the tensor, and of the direction in which
it goes), to those of whole tensors. All ranks call it."""


@dataclass(frozen=True)
class Shared:
    """Learning rate and step, which all parameters share. Both are float64 scalars, so that no precision is lost before
    they are used, and on the CPU whatever device the parameters are on: they are numbers of the loop, some devices have
    no float64, and a scalar of the CPU goes with tensors of any device.

    `step` counts the updates of the whole, 1 in the first. torch.optim counts for each parameter alone, which differs
    only for a parameter whose gradient comes and goes.
    """

    lr: Tensor
    step: Tensor


@dataclass(frozen=True)
class OptimizerState:
    """Everything an optimizer carries from step to step."""

    shared: Shared
    slots: Mapping[str, Slots]  # by parameter name

    @property
    def num_bytes(self) -> int:
        """Of the memory that the slots keep alive, which is more than their own where they are views."""
        storages = [slot.untyped_storage() for slots in self.slots.values() for slot in slots.values()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def slots_beside(parameter: Tensor, slots: Slots) -> Slots:
    """Slots that came from elsewhere (a checkpoint, a server), on the device of their parameter. Counters, which have
    no dimensions, stay on the CPU, where torch.optim has them."""
    device = parameter.device
    return {name: slot.to(device) if slot.dim() or not parameter.dim() else slot for name, slot in slots.items()}


class AbstractRule(ABC):
    """The mathematics of one optimizer, one tensor at a time."""

    @property
    @abstractmethod
    def scope(self) -> Scope: ...

    @abstractmethod
    def initial_slots(self, parameter: Tensor) -> Slots: ...

    @abstractmethod
    def new_input(self, shared: Shared) -> Shared: ...

    @abstractmethod
    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor: ...

    @abstractmethod
    def update_rule(
        self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared
    ) -> tuple[Tensor, Slots]: ...


class AbstractOptimizer(ABC):
    """An optimizer as the loop drives it: a rule over all parameters, or a torch.optim optimizer as it is.

    A run starts from `init(parameters)` or from an OptimizerState read from a checkpoint; every step then is
    `state = optimizer.update(gradients, parameters, state, optimizer.lr * schedule(samples))`.
    """

    @property
    @abstractmethod
    def lr(self) -> float:
        """The base learning rate: what a schedule multiplies."""

    @property
    @abstractmethod
    def scope(self) -> Scope:
        """Whether it may update pieces of parameters, does so by norms of the whole, or needs each of them whole."""

    @abstractmethod
    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState: ...

    @abstractmethod
    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        """Where the next gradient is to be taken: `parameters` itself, the same object, if at the parameters."""

    @abstractmethod
    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        """One step, written into `parameters` in place. A gradient of None, or none by that name, leaves the parameter
        and its slots alone. The state given is consumed: use the one that is returned.

        Args:
            whole_norms: from norms of pieces to those of whole tensors, where `parameters` are pieces and the scope is
                "layer": then all ranks call it, also one that has no piece.
        """
