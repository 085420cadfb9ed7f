"""Expert parallelism (GShard, Lepikhin et al., 2020): experts are split over ranks that are data parallel otherwise.

    expert=2          rank 0                     rank 1
    samples           its share                  its share
    gates, attention  all of it                  all of it              gradients are added up over both
    experts           A B                        C D                    gradients are whole already: they were made of
                                                                        the tokens of both ranks

Gradients are weighted before backward (weighting.py), for in those of an expert the samples of all ranks are mixed.
Capacity counts over the tokens of a sample, and the noise of a gate is drawn by the rank that has the sample, as a rank
with all experts would.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.expert.token_exchange import TokenExchange
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.weighting import Weighting, weigh_loss
from weft.distributed.placement.whole import gather_whole
from weft.errors import PlanError
from weft.graph import AbstractExecutor, Loss
from weft.specs import Axis, Plan
from weft.training.checkpoint import Cut, compose, fused_cut
from weft.training.models.experts import Experts, MixtureOfExperts, mixtures_of
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.optimizers.torch_optimizer import scope_of
from weft.training.placement import AbstractPlacement, MakeExecutor

__all__ = ["ExpertParallel", "make_expert"]


def make_expert(groups: MeshGroups, plan: Plan, inner: AbstractPlacement) -> AbstractPlacement:
    return ExpertParallel(groups.apart("expert"), groups.holders, inner)


@final
class ExpertParallel(AbstractPlacement):
    """Every rank of the group has the same number of experts of each mixture of experts.

    Args:
        group: the ranks along the axis `expert`.
        holders: the ranks that together hold all parts of the model.
        inner: of the axes that are cut before.
    """

    def __init__(self, group: AbstractGroup, holders: AbstractGroup, inner: AbstractPlacement) -> None:
        self._group = group
        self._holders = holders
        self._inner = inner
        self._weighting = inner.weighting or Weighting()
        self._cuts: dict[str, Cut] = {}  # by parameter
        self._experts: list[Experts] = []

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:
        self._inner.look_at(inputs)

    def place(self, module: nn.Module) -> nn.Module:
        """Every rank checks the whole model, so that all find the same."""
        layers = dict(mixtures_of(module))
        if not layers:
            raise PlanError(f"model has no experts to split (expert: {self._group.size}); use data={self._group.size}")
        for name, layer in layers.items():
            _check(name, layer, self._group.size)
        module = self._inner.place(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for _, layer in mixtures_of(module):
            layer.weighting = self._weighting
            layer.experts.carrier = TokenExchange(self._group, self._weighting)
            for parameter in layer.experts.parameters():
                self._cuts[names[id(parameter)]] = self._cut(parameter)
            self._experts.append(layer.experts)
        return module

    def _cut(self, parameter: nn.Parameter) -> Cut:
        """This rank's experts, in the same object, which an optimizer may know."""
        own = len(parameter) // self._group.size
        first = self._group.rank * own
        cut = fused_cut(tuple(parameter.shape), 0, [(first, first + own)])
        parameter.data = cut.take(parameter.data)
        return cut

    @contextmanager
    def use_whole(self) -> Iterator[None]:
        with self._inner.use_whole():
            parts = [(parameter, parameter.data) for experts in self._experts for parameter in experts.parameters()]
            carriers = [experts.carrier for experts in self._experts]
            for parameter, part in parts:
                whole = part.new_empty((len(part) * self._group.size, *part.shape[1:]))
                self._group.all_gather(whole, part)
                parameter.data = whole
            for experts in self._experts:
                experts.carrier = None
            try:
                yield
            finally:
                for parameter, part in parts:
                    parameter.data = part
                for experts, carrier in zip(self._experts, carriers, strict=True):
                    experts.carrier = carrier

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        is_weighted = self._inner.weighting is not None
        return self._inner.execute(module, loss if is_weighted else weigh_loss(loss, self._weighting), make)

    @property
    def has_loss(self) -> bool:
        return self._inner.has_loss

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        axes = self._inner.reduced_over(name)
        return tuple(axis for axis in axes if axis != "expert") if name in self._cuts else axes

    @property
    def weighting(self) -> Weighting:
        return self._weighting

    @property
    def activation_bytes(self) -> int:
        return self._inner.activation_bytes

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.owned(parameters)

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        if optimizer.scope != "element":
            raise PlanError(_needs_whole(type(optimizer).__name__, self._group.size))
        return self._inner.prepare(optimizer, parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        if scope_of(type(optimizer)) != "element":
            raise PlanError(_needs_whole(type(optimizer).__name__, self._group.size))
        self._inner.take_over(optimizer, parameters)

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return self._inner.spread(tensors)

    def cut_of(self, name: str) -> Cut | None:
        kind, _, rest = name.partition("/")
        own = self._cuts.get(rest.rpartition("/")[0] if kind == "slot" else rest)
        return compose(self._inner.cut_of(name), own)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gather_whole(self._holders, self.cut_of, tensors)

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Of experts, that of all of them; the rest is the same on all ranks of the group."""
        own = [name for name in self._cuts if name in norms]
        if not own:
            return self._inner.norm(norms)
        squares = torch.stack([norms[name] for name in own]).double().square()
        self._group.all_reduce(squares)
        like = norms[own[0]]
        return self._inner.norm({**norms, **dict(zip(own, squares.sqrt().to(like.dtype), strict=True))})


def _check(name: str, layer: MixtureOfExperts, size: int) -> None:
    num_experts = layer.num_experts
    if num_experts % size:
        nearest = max(n for n in range(1, size) if num_experts % n == 0)
        numbers = f"layer: {name or 'the model'}, experts: {num_experts}, expert: {size}"
        raise PlanError(f"experts cannot be split in equal numbers ({numbers}); use expert={nearest}")


def _needs_whole(optimizer: str, size: int) -> str:
    about = f"optimizer: {optimizer}, expert: {size}"
    return f"optimizer needs whole tensors, and ranks hold some of the experts ({about}); use an element-wise one"
