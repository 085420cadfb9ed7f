"""Synchronous data parallelism: replicas that are equal to the last bit after every step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, entries_of, remember_entries
from weft.distributed.group.calls import Broadcast
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.exchange import GradientExchange
from weft.distributed.placement.factors.layers import FactoredLayers
from weft.distributed.placement.reducers import AbstractReducer
from weft.distributed.placement.shares import MeasuredShares
from weft.distributed.placement.statistics import average_statistics
from weft.graph import GradientSink, State
from weft.specs import Axis, Mesh
from weft.training.checkpoint import Entry
from weft.training.optimizers import AbstractOptimizer, OptimizerState, split_momentum
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import AbstractReplicas, Consensus, Traffic, Update
from weft.training.sampling import share

__all__ = ["DataParallel"]


@final
class DataParallel(AbstractReplicas):
    """One rank of every replica in a group, which add up their gradients in every step.

    Args:
        group: one rank of every replica, in the order of replicas.
        world: all ranks, which stop and save together; by default those of the group.
        buffers: running statistics before an evaluation: averaged ("mean"), or each rank keeps its own ("rank").
        codec: what is sent instead of gradients; by default they are.
        placement: the part of the model that is this rank's; by default all of it.
        group_over: the group of ranks along axes of the mesh, in which the placement adds gradients up; by default all
            are added up in `group`.
        make_reducer: how sums of gradients come to where the placement needs them, made when the model is known; by
            default every rank gets every sum.
    """

    def __init__(
        self,
        group: AbstractGroup,
        *,
        world: AbstractGroup | None = None,
        mesh: Mesh | None = None,
        buffers: Literal["mean", "rank"] = "mean",
        codec: AbstractCodec | None = None,
        placement: AbstractPlacement | None = None,
        group_over: Callable[[tuple[Axis, ...]], AbstractGroup] | None = None,
        make_reducer: Callable[[], AbstractReducer] | None = None,
    ) -> None:
        self._group = group
        self._codec = codec or ExactCodec()
        self._world = world or group
        self._mesh = mesh or Mesh(group.rank, data=group.size)
        self._buffers = buffers
        self._placement = placement or WholeModel()
        self._group_over = group_over or (lambda axes: group)
        self._make_reducer = make_reducer
        self.shares: MeasuredShares | None = None
        """Of a batch, where they are dealt by measured speed; None where they are equal."""
        self.factors: FactoredLayers | None = None
        """Layers whose gradients of weights are sent as factors; None where none are."""
        self._num_samples = 0  # of the share that was taken last
        self._parameters: Mapping[str, Tensor] = {}
        self._exchange: GradientExchange | None = None
        self._spreading = Traffic()

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def codec(self) -> AbstractCodec:
        return self._codec

    @property
    def group(self) -> AbstractGroup:
        return self._group

    @property
    def placement(self) -> AbstractPlacement:
        return self._placement

    @property
    def is_synchronous(self) -> bool:
        return True

    @property
    def exchange(self) -> GradientExchange:
        assert self._exchange is not None, "join() comes first"
        return self._exchange

    @torch.no_grad()
    def join(self, model: State) -> None:
        if self.shares is not None:
            self.shares.begin()
        self.level(model)
        self._codec.remember({})
        self._parameters = model.parameters
        self._placement.owned(model.parameters)
        reducer = self._make_reducer() if self._make_reducer else None
        self._exchange = GradientExchange(
            self._group,
            model.parameters,
            self._codec,
            world=self._world,
            reducer=reducer,
            group_of=self._group_of,
            factors=self.factors,
            is_part=lambda name: self._placement.cut_of(f"gradient/{name}") is not None,
        )

    @torch.no_grad()
    def level(self, model: State) -> None:
        """Every rank gets what the first of those has that hold the same part, in place. A collective call."""
        works = [
            self._group_over(axes).start(Broadcast(parameter.detach()))
            for axes, parameter in ((self._placement.copied_over(name), p) for name, p in model.parameters.items())
            if any(self._mesh.size(axis) > 1 for axis in axes)
        ]
        works += [self._group.start(Broadcast(buffer)) for buffer in model.buffers.values()]
        for work in works:
            work.wait()

    def _group_of(self, name: str) -> AbstractGroup:
        """The ranks that hold the same part of a parameter, and add up its gradients."""
        return self._group_over(self._placement.reduced_over(name))

    def adopt(self, optimizer: AbstractOptimizer) -> AbstractOptimizer:
        if not self._codec.takes_momentum:
            return optimizer
        rest, momentum, is_nesterov = split_momentum(optimizer)
        self._codec.set_momentum(momentum, nesterov=is_nesterov)
        return rest

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        if self.shares is not None:
            own = indices[self.shares.span(len(indices))]
            self._num_samples = len(own)
            return own
        return share(indices, self._mesh.replica, self._mesh.num_replicas)

    def begin(self, weight: float) -> GradientSink:
        if self.shares is not None:
            self.shares.start(self._num_samples)
        weighting = self._placement.weighting
        if weighting is not None:  # gradients will have their weight when they come
            weighting.replica, weight = weight, 1.0
        if self.factors is not None:
            self.factors.begin()
        self.exchange.begin(weight)
        return self.exchange.add

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        if self.shares is not None:
            self.shares.stop()
        total, state = self.exchange.finish(loss, update)
        began = self._group.clock.now()
        num_bytes = self._placement.spread(self._parameters)
        self._spreading = Traffic(self._group.clock.now() - began, 0.0, num_bytes)
        if self.shares is not None:
            self.shares.end_step(self.gather)
        return total, state

    def traffic(self) -> Traffic:
        return self.exchange.traffic().plus(self._spreading)

    def collect(self, state: OptimizerState) -> OptimizerState:
        """That of the pieces that are this rank's."""
        return state

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
        self._world.all_reduce(tensor)
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
        """The codec's: what ranks have not sent yet, of which for another number of ranks only the sum matters."""
        found = entries_of(self._codec, self._parameters, self._placement.cut_of)
        return found | (self.shares.memory() if self.shares is not None else {})

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        remember_entries(self._codec, entries)
        if self.shares is not None:
            self.shares.remember(step, entries)
