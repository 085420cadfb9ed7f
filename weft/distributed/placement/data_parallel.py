"""Synchronous data parallelism: every rank a replica, all of them equal to the last bit after every step."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce, Broadcast, Call
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.all_reduce import AllReduceExchange
from weft.distributed.placement.exchange import AbstractExchange
from weft.distributed.placement.server import ServerExchange
from weft.graph import GradientSink, State
from weft.specs.plan import Plan
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Traffic, Update
from weft.training.sampling import share

__all__ = ["DataParallel"]


@final
class DataParallel(AbstractReplicas):
    """The ranks of a group as replicas; the plan's topology says through whom gradients go.

    Args:
        buffers: running statistics before an evaluation: averaged ("mean"), or each rank keeps its own ("rank").
    """

    def __init__(self, group: AbstractGroup, plan: Plan, *, buffers: Literal["mean", "rank"] = "mean") -> None:
        self._group = group
        self._buffers = buffers
        self._plan = plan
        self._exchange: AbstractExchange | None = None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def exchange(self) -> AbstractExchange:
        assert self._exchange is not None, "join() comes first"
        return self._exchange

    @torch.no_grad()
    def join(self, model: State) -> None:
        tensors = [*model.parameters.values(), *model.buffers.values()]
        self._run_all(lambda tensor: Broadcast(tensor.detach()), tensors)
        self._exchange = make_exchange(self._group, self._plan, model.parameters)

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self.rank, self.size)

    def begin(self, weight: float) -> GradientSink:
        self.exchange.begin(weight)
        return self.exchange.add

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        return self.exchange.finish(loss, update)

    def traffic(self) -> Traffic:
        return self.exchange.traffic()

    def collect(self, state: OptimizerState) -> OptimizerState:
        return self.exchange.collect(state)

    def sum(self, tensor: Tensor) -> Tensor:
        self._group.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        output = tensor.new_empty((self.size, *tensor.shape))
        self._group.all_gather(output, tensor.unsqueeze(0))
        return tuple(output)

    @torch.no_grad()
    def align(self, buffers: Mapping[str, Tensor]) -> None:
        """Running statistics become their mean over ranks; counters, which are whole numbers, become rank 0's."""
        if self._buffers == "mean":
            self._run_all(lambda t: AllReduce(t, "mean") if t.is_floating_point() else Broadcast(t), buffers.values())

    def _run_all(self, call: Callable[[Tensor], Call], tensors: Iterable[Tensor]) -> None:
        works = [self._group.start(call(tensor)) for tensor in tensors]
        for work in works:
            work.wait()


def make_exchange(group: AbstractGroup, plan: Plan, parameters: Mapping[str, Tensor]) -> AbstractExchange:
    if plan.topology.name == "server":
        return ServerExchange(group, parameters, int(plan.topology["shards"]))
    return AllReduceExchange(group, parameters)
