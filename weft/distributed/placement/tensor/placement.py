"""Tensor parallelism: every rank holds a part of each layer that can be split, and all ranks take the same samples.

tensor=2                  rank 0                     rank 1
first (split by outputs)  W[:h/2]                    W[h/2:]            x is on both, whole
second (by inputs)        W[:, :h/2]                 W[:, h/2:]         sums of the two products: one all-reduce
norms, biases after sums  whole                      whole              the same on both, to the last bit
loss                      counted                    computed, not counted
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.codecs.activations import AbstractWireFormat, make_format
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.rules import NO_RULES, Rules
from weft.distributed.placement.tensor.loss import take_parts
from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.sequence import split_sequences
from weft.distributed.placement.tensor.space import split_space
from weft.distributed.placement.tensor.splitting import split_model
from weft.distributed.placement.whole import gather_whole
from weft.errors import PlanError
from weft.graph import AbstractExecutor, EagerExecutor, Loss
from weft.specs import Plan
from weft.specs.mesh import Axis
from weft.training.checkpoint import Cut, compose
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.optimizers.torch_optimizer import scope_of
from weft.training.placement import AbstractPlacement, MakeExecutor
from weft.training.weighting import Weighting

__all__ = ["TensorParallel", "make_tensor"]


def make_tensor(
    groups: MeshGroups, plan: Plan, inner: AbstractPlacement, *, rules: Rules = NO_RULES
) -> AbstractPlacement:
    """The placement of a rank along the axis `tensor`. A collective call.

    Args:
        inner: that of the axes around it.
        rules: how layers are split, by hand.
    """
    return TensorParallel(
        groups.apart("tensor"),
        groups.holders,
        inner,
        rules=rules,
        may_be_whole=plan.pipeline > 1,
        wire_format=make_format(plan.activations),
    )


@final
class TensorParallel(AbstractPlacement):
    """One rank of those that hold the model's layers together.

    Args:
        group: these ranks.
        holders: all ranks that together hold the model.
        inner: the placement of the axes around this one.
        rules: as of make_tensor.
        may_be_whole: whether a model of which nothing can be split is taken all the same, as one stage of several.
        wire_format: in which activations travel.
    """

    def __init__(
        self,
        group: AbstractGroup,
        holders: AbstractGroup,
        inner: AbstractPlacement,
        *,
        rules: Rules = NO_RULES,
        may_be_whole: bool = False,
        wire_format: AbstractWireFormat | None = None,
    ) -> None:
        self._group = group
        self._holders = holders
        self._inner = inner
        self._rules = rules
        self._may_be_whole = may_be_whole
        self._region = Region(group, wire_format)
        self._cuts: dict[str, Cut] = {}
        self._in_rows: frozenset[str] = frozenset()  # parameters of layers that take parts of pictures or sequences

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """Of parameters and buffers that are split, by name."""
        return self._cuts

    def use_whole(self) -> AbstractContextManager[None]:
        return self._inner.use_whole()

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:
        self._inner.look_at(inputs)

    def place(self, module: nn.Module) -> nn.Module:
        module = self._inner.place(module)
        if self._group.size > 1:
            self._in_rows = split_space(module, self._region, self._rules)
            in_sequence = split_sequences(module, self._region, self._rules)
            self._cuts |= split_model(module, self._region, self._rules, self._is_taken)
            self._in_rows |= {name for name in in_sequence if name not in self._cuts}
            if not (self._cuts or self._in_rows) and not self._may_be_whole:
                raise PlanError(
                    f"no layer of the model can be split (model: {type(module).__name__}, tensor: {self._group.size}); "
                    "give rules for its layers, or use data=N"
                )
        return module

    def _is_taken(self, name: str) -> bool:
        return name in self._in_rows or self._inner.cut_of(f"parameter/{name}") is not None

    @property
    def weighting(self) -> Weighting | None:
        return self._inner.weighting

    @property
    def activation_bytes(self) -> int:
        return self._inner.activation_bytes + self._region.group.num_bytes

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        if self._group.size == 1:
            return self._inner.execute(module, loss, make)

        def make_checked(part: nn.Module, own_loss: Loss) -> AbstractExecutor:
            executor = make(part, own_loss)
            _check_executor(executor)
            return executor

        return self._inner.execute(module, take_parts(module, loss, self._region), make_checked)

    @property
    def has_loss(self) -> bool:
        return self._group.rank == 0 and self._inner.has_loss

    def copied_over(self, name: str) -> tuple[Axis, ...]:
        axes = self._inner.copied_over(name)
        return (*axes, "tensor") if name in self._in_rows else axes

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        axes = self._inner.reduced_over(name)
        return (*axes, "tensor") if name in self._in_rows else axes

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.owned(parameters)

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return self._inner.prepare(optimizer, parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        kind = type(optimizer)
        if self._cuts and scope_of(kind) != "element":
            raise PlanError(
                f"optimizer may need whole tensors, and layers are split (optimizer: {kind.__name__}, plan: tensor); "
                "use an element-wise one of torch.optim, or data=N"
            )
        self._inner.take_over(optimizer, parameters)

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return self._inner.spread(tensors)

    def cut_of(self, name: str) -> Cut | None:
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0] if kind == "slot" else rest
        own = self._cuts.get(owner) if kind in ("parameter", "gradient", "buffer", "slot") else None
        return compose(self._inner.cut_of(name), own)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gather_whole(self._holders, self.cut_of, tensors)

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        return self._inner.norm(self._of_all_parts(norms))

    def whole_norms(self, norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        joined = self._of_all_parts(norms)
        split = {name: joined[name] for name in joined if name in self._cuts}
        return {**self._inner.whole_norms({name: norm for name, norm in joined.items() if name not in split}), **split}

    def _of_all_parts(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a parameter that is split the norm of all its parts; one that is whole counts once."""
        split = [name for name in norms if name in self._cuts]
        if self._group.size == 1 or not split:
            return dict(norms)
        squares = torch.stack([norms[name].double() for name in split]).cpu().square()
        self._group.all_reduce(squares)
        joined = dict(zip(split, squares.sqrt(), strict=True))
        return {name: joined[name].to(norm) if name in joined else norm for name, norm in norms.items()}


def _check_executor(executor: AbstractExecutor) -> None:
    if not isinstance(executor, EagerExecutor):
        raise PlanError(
            f"layers that are split talk to other ranks, which a captured graph does not hold "
            f"(executor: {type(executor).__name__}, plan: tensor); use executor=eager"
        )
