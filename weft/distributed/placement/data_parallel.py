"""Synchronous data parallelism: every rank a replica, all of them equal to the last bit after every step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.group.calls import Broadcast
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.all_reduce import AllReduceExchange
from weft.distributed.placement.statistics import average_statistics
from weft.graph import GradientSink, State
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Consensus, Traffic, Update
from weft.training.sampling import share

__all__ = ["DataParallel"]


@final
class DataParallel(AbstractReplicas):
    """One rank of every replica in a group, which averages gradients by all-reduce.

    Args:
        group: one rank of every replica, in the order of replicas.
        world: all ranks, which stop and save together; by default those of the group.
        buffers: running statistics before an evaluation: averaged ("mean"), or each rank keeps its own ("rank").
    """

    def __init__(
        self,
        group: AbstractGroup,
        *,
        world: AbstractGroup | None = None,
        mesh: Mesh | None = None,
        buffers: Literal["mean", "rank"] = "mean",
    ) -> None:
        self._group = group
        self._world = world or group
        self._mesh = mesh or Mesh(group.rank, data=group.size)
        self._buffers = buffers
        self._exchange: AllReduceExchange | None = None

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def group(self) -> AbstractGroup:
        return self._group

    @property
    def is_synchronous(self) -> bool:
        return True

    @property
    def exchange(self) -> AllReduceExchange:
        assert self._exchange is not None, "join() comes first"
        return self._exchange

    @torch.no_grad()
    def join(self, model: State) -> None:
        tensors = [*model.parameters.values(), *model.buffers.values()]
        for work in [self._group.start(Broadcast(tensor.detach())) for tensor in tensors]:
            work.wait()
        self._exchange = AllReduceExchange(self._group, model.parameters)

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self._mesh.replica, self._mesh.num_replicas)

    def begin(self, weight: float) -> GradientSink:
        self.exchange.begin(weight)
        return self.exchange.add

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        return self.exchange.finish(loss, update)

    def traffic(self) -> Traffic:
        return self.exchange.traffic()

    def collect(self, state: OptimizerState) -> OptimizerState:
        return state

    def cut_of(self, name: str) -> None:
        """Every rank has the whole of everything."""

    def agree_to_stop(self, wish: bool) -> bool:
        return self._any(wish)

    def agree_to_save(self, wish: bool) -> bool:
        return self._any(wish)

    def _any(self, wish: bool) -> bool:
        """Of all ranks, not of all replicas: those that hold other parts of the model must hear of it too."""
        wishes = torch.tensor([float(wish)])
        self._world.all_reduce(wishes)
        return bool(wishes.item())

    def dismiss(self) -> None:
        pass

    def sum(self, tensor: Tensor) -> Tensor:
        self._group.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        output = tensor.new_empty((self._world.size, *tensor.shape))
        self._world.all_gather(output, tensor.unsqueeze(0))
        return tuple(output)

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        if self._buffers == "mean":
            average_statistics(self._group, model.buffers.values())
        yield Consensus(self)

    def memory(self) -> Mapping[str, Entry]:
        return {}

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        pass
