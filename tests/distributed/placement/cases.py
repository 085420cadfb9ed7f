"""What the tests of placements share: parameters, gradients, and a group that reduces in the order of ranks."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce, Call, Reduce, ReduceScatter
from weft.distributed.group.dense import reduce_parts
from weft.distributed.group.group import AbstractGroup, AbstractWork, DoneWork
from weft.distributed.placement import GradientExchange
from weft.training.optimizers import SGD, AbstractOptimizer, Optimizer, OptimizerState
from weft.training.replicas import Update

__all__ = ["RankOrderGroup", "gradients_of_rank", "make_parameters", "make_update", "run_step"]

SHAPES = {"w1": (6, 5), "b1": (6,), "w2": (3, 6), "b2": (3,), "scale": ()}


def make_parameters(
    dtype: torch.dtype = torch.float32, shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, Tensor]:
    """The same values whenever they are asked for."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }


def gradients_of_rank(parameters: Mapping[str, Tensor], rank: int, step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for name, p in parameters.items()
    }


def make_update(
    parameters: Mapping[str, Tensor],
    optimizer: AbstractOptimizer | None = None,
    state: OptimizerState | None = None,
    clip_norm: float | None = None,
) -> Update:
    optimizer = optimizer or Optimizer(SGD(), lr=1.0)
    return Update(optimizer, parameters, state or optimizer.init(parameters), optimizer.lr, clip_norm)


def run_step(
    exchange: GradientExchange,
    gradients: Mapping[str, Tensor | None],
    weight: float,
    update: Update,
    loss: float = 0.0,
) -> tuple[float, OptimizerState]:
    """Gradients are added as backward would, the last parameter's first."""
    exchange.begin(weight)
    for name in reversed(list(gradients)):
        exchange.add(name, gradients[name])
    return exchange.finish(loss, update)


@final
class RankOrderGroup(AbstractGroup):
    """Wraps a group: all reductions sum ((x0 + x1) + x2) + ..., halves in 32 bits, as those of native groups do."""

    def __init__(self, inner: AbstractGroup) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner

    def start(self, call: Call) -> AbstractWork:
        if not isinstance(call, AllReduce | Reduce | ReduceScatter):
            return self._inner.start(call)
        everyone = call.tensor.new_empty((self.size, *call.tensor.shape))
        self._inner.all_gather(everyone, call.tensor.unsqueeze(0))
        total = reduce_parts(everyone, call.op)
        if isinstance(call, ReduceScatter):
            begin = self.rank * len(call.output) if call.sizes is None else sum(call.sizes[: self.rank])
            call.output.copy_(total[begin : begin + len(call.output)])
        elif isinstance(call, AllReduce) or call.root == self.rank:
            call.tensor.copy_(total)
        return DoneWork()

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        return RankOrderGroup(self._inner.split(colour, key))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()
