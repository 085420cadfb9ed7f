"""The placement seam: the part of a model that a rank holds, computes with and updates.

    the model, as it was built        w1        b1    w2        b2       the same on every rank
    place      the module with which this rank computes: the model itself, its layers with parts in the place of their
               parameters, or some of its layers. A parameter keeps its name, whatever part of it is here
    execute    the executor of that module: the recipe's own, or one that gathers parameters when they are needed and
               lets them go again, or one that passes micro-batches from stage to stage
    has_loss   whether this rank counts the loss of its replica: one of its ranks does
    reduced_over   the axes along which gradients of a parameter are added up
    weighting  where samples of several replicas meet in a layer: gradients are weighted before backward, not after it
    owned      the pieces of parameters that this rank updates: all of them, or those of its own shard
    norm       of gradients that lie in pieces on several ranks
    spread     pieces that were updated, to the ranks that compute with them

Placements of several axes wrap each other, that of the innermost axis outside: the state of `shard` is cut from the
layers that `tensor` has cut from the stage that `pipeline` has left:

    ShardedState(inner=TensorParallel(inner=Pipeline(inner=WholeModel())))

The loop asks no more than this. How gradients come to where parameters are updated, and parameters to where they are
needed, is between a placement and its exchange (weft/distributed/placement).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.graph import AbstractExecutor, Loss
from weft.specs.mesh import REPLICATED, Axis
from weft.training.checkpoint import Cut
from weft.training.gradients import joint_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.weighting import Weighting

__all__ = ["AbstractPlacement", "MakeExecutor", "WholeModel"]

MakeExecutor = Callable[[nn.Module, Loss], AbstractExecutor]


class AbstractPlacement(ABC):
    """Every method that says so is called by all ranks, in the same order."""

    @abstractmethod
    def place(self, module: nn.Module) -> nn.Module:
        """The module with which this rank computes, made from the whole model, which is not used afterwards: it may be
        changed in place. Parameters keep their names in it. All ranks call it, before anything knows the parameters."""

    def use_whole(self) -> AbstractContextManager[None]:
        """While it is held, a forward needs no other rank than those of its replica, for an evaluation in which each
        goes at its own pace. All ranks enter it; a placement around another enters that of the inner one."""
        return nullcontext()

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:  # noqa: B027 -- most need not look
        """Inputs like those that the model will get, before it is placed: where to cut it may hang on what its layers
        make of them. One that wraps another passes them on."""

    @abstractmethod
    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        """The executor of a module that was placed; `make` is the recipe's own, of a module and a loss."""

    @property
    @abstractmethod
    def has_loss(self) -> bool:
        """Whether this rank counts the loss and the predictions of its replica, of whose ranks one does."""

    @abstractmethod
    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        """The axes of the mesh along which this parameter's gradients are added up: its ranks all hold the same part of
        it, and have computed with different samples, or with different parts of their activations."""

    def copied_over(self, name: str) -> tuple[Axis, ...]:
        """The axes along which this rank's part of the parameter is held by others too: those along which gradients are
        added up, except where each rank keeps another piece of it."""
        return self.reduced_over(name)

    @property
    def weighting(self) -> Weighting | None:
        """Where samples of several replicas meet in a layer, that by which gradients are weighted before they do. All
        replicas then take every forward together. A placement around another gives that of the inner one."""
        return None

    @property
    def activation_bytes(self) -> int:
        """Of activations and their gradients that this rank has sent so far, to others of its replica. A placement
        around another adds that of the inner one."""
        return 0

    @property
    def takes_forwards_together(self) -> bool:
        """Whether replicas need each other in every forward, be it for samples that meet there or for parameters: one
        that has no samples computes with none."""
        return self.weighting is not None

    @abstractmethod
    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The pieces that this rank updates, as views of the parameters, by name; one that it has no piece of is left
        out."""

    @abstractmethod
    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        """Where the optimizer wants the next gradient, whole: `parameters` itself, the same object, if there. All ranks
        call it."""

    @abstractmethod
    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """Let an optimizer of torch.optim, which steps when a script says so, update the pieces that this rank owns.

        Raises:
            PlanError: it needs whole tensors, and this rank does not update whole ones.
        """

    @abstractmethod
    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        """Bring the pieces that each rank owns to those that compute with them, in place; the bytes that this rank
        sent. Called for the parameters after an update, by all ranks."""

    @abstractmethod
    def cut_of(self, name: str) -> Cut | None:
        """The part that this rank holds of a checkpoint's entry (`parameter/w`, `slot/w/velocity`), or has of a
        gradient before it is added up (`gradient/w`); None for all of it."""

    @abstractmethod
    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Entries of a checkpoint (`parameter/w`, `slot/w/velocity`) of the whole model, put together from the parts of
        all ranks, who all call it with theirs."""

    @abstractmethod
    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """The L2 norm of all gradients, of which this rank's pieces have these norms, by name. All ranks call it."""

    def whole_norms(self, norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """L2 norms of whole tensors, by name two for each, of which this rank's pieces have these: for rules that scale
        an update by them. All ranks call it, and one message does for all tensors.

        Raises:
            PlanError: a tensor is cut, and this placement has no sum over its parts.
        """
        for name in norms:
            if self.cut_of(f"parameter/{name}") is not None:
                raise PlanError(
                    f"optimizer needs norms of whole tensors, and layers are cut ({name}); use one that is element-wise"
                )
        return norms


@final
class WholeModel(AbstractPlacement):
    """The whole model on every rank, which makes every update."""

    def place(self, module: nn.Module) -> nn.Module:
        return module

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        return make(module, loss)

    @property
    def has_loss(self) -> bool:
        return True

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        return REPLICATED

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return parameters

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return optimizer.prepare(parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        """It updates every parameter as it is."""

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def cut_of(self, name: str) -> None:
        """All of everything."""

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        return joint_norm(norms)
