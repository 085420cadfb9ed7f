"""The optimizer's state split over ranks (ZeRO stage 1, Rajbhandari et al., 2020): each updates its own pieces.

    2 ranks, a bucket           [     w2      | b1 |      w1      ]
    gradients, on each          g  g  g  g  g  g  g  g  g  g  g  g         reduce-scatter
    rank 0                      s  s  s  s  s  s  |                        sums, optimizer state and update of this half
    rank 1                                        |  s  s  s  s  s  s      and of that half
    parameters, on each         w  w  w  w  w  w  w  w  w  w  w  w         all-gather

The bytes of a step are those of an all-reduce, which is a reduce-scatter and an all-gather. Every bucket is cut into as
many parts as there are ranks, so that all of them have as much to do whichever layer is on its way.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.codecs import write
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllGather
from weft.distributed.group.group import AbstractWork
from weft.distributed.placement.bucket_cut import BucketCut, cut_bucket
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.placement.cut import cut_evenly
from weft.distributed.placement.shards import AbstractShards
from weft.distributed.placement.torch_steps import TorchSteps
from weft.graph import AbstractExecutor, Loss
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.optimizers.offloading import move_state_to_disk
from weft.training.placement import AbstractPlacement, MakeExecutor, WholeModel

__all__ = ["ShardedState"]

MOST_UNDER_WAY = 4
"""Packed messages of parameters, which need memory while they travel."""


@final
class ShardedState(AbstractShards):
    """Every rank has all parameters that the placement inside leaves to it, and one part of each bucket to update.

    Args:
        group: the ranks that hold the optimizer's state together.
        holders: the ranks that together hold every part of the model; by default the group.
        whole_gradients: every rank is given every sum of gradients; else those of its own pieces.
        offloads: the state of optimizers that are taken over goes to disk.
    """

    def __init__(
        self,
        group: AbstractGroup,
        inner: AbstractPlacement | None = None,
        holders: AbstractGroup | None = None,
        *,
        whole_gradients: bool = False,
        offloads: bool = False,
    ) -> None:
        super().__init__(group, inner or WholeModel(), holders)
        self._offloads = offloads
        self._whole_gradients = whole_gradients
        self._parameters: Mapping[str, Tensor] = {}
        self._owned: dict[str, Tensor] = {}
        self.cuts: tuple[BucketCut, ...] = ()
        self._looks_ahead: bool | None = None  # the optimizer; None where nobody has asked

    def lies_in_pieces(self, kind: str) -> bool:
        return kind == "slot"

    def place(self, module: nn.Module) -> nn.Module:
        return self._inner.place(module)

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        return self._inner.execute(module, loss, make)

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if parameters is not self._parameters:
            if not _are_same(parameters, self._parameters):
                self._cut(parameters)
            self._parameters = parameters
        return self._owned

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        owned = self.owned(parameters)
        points = optimizer.prepare(owned, state)
        if self._looks_ahead is None:
            # Asked once, of all: a rank that owns nothing has no point that could differ from its parameters.
            wishes = torch.tensor([float(points is not owned)])
            self._group.all_reduce(wishes)
            self._looks_ahead = bool(wishes.item())
        if not self._looks_ahead:
            return parameters
        whole = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        write({name: self._pieces[name].of(whole[name]) for name in points}, points)
        self.spread(whole)
        return whole

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        TorchSteps(self, optimizer, parameters, {name: self._pieces[name] for name in self.owned(parameters)})
        if self._offloads:
            optimizer.register_step_post_hook(lambda *_: move_state_to_disk(optimizer))

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        return self._inner.norm(norms) if self._whole_gradients else super().norm(norms)

    @torch.no_grad()
    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        works: list[tuple[BucketCut, Tensor | None, AbstractWork]] = []
        for cut in self.cuts:
            if len(works) >= MOST_UNDER_WAY:
                _receive(tensors, *works.pop(0))
            works.append((cut, *self._start_gather(cut, tensors)))
        for row in works:
            _receive(tensors, *row)
        return sum(part.num_bytes for cut in self.cuts for part in [cut.parts[self._group.rank]])

    def _cut(self, parameters: Mapping[str, Tensor]) -> None:
        """Trained parameters bucket by bucket; those that are not trained, which nobody sends, all together."""
        size, rank = self._group.size, self._group.rank
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in parameters.items() if name not in trained}
        buckets = plan_buckets(trained, key=self.reduced_over)
        self.cuts = tuple(cut_bucket(bucket, trained, size) for bucket in buckets)
        own = [piece for cut in self.cuts for piece in cut.parts[rank].pieces] + [*cut_evenly(frozen, size)[rank]]
        self.note_pieces(parameters, {piece.name: piece for piece in own})
        # In the model's order, in which an optimizer and its checkpoints have them.
        names = [name for name in parameters if name in self._pieces]
        self._owned = {name: self._pieces[name].of(parameters[name].detach()) for name in names}
        self._looks_ahead = None

    def _start_gather(self, cut: BucketCut, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, AbstractWork]:
        """Parts lie in the message already; the memory of a parameter that travels alone is that."""
        rank = self._group.rank
        message = None if _is_alone(cut, tensors) else cut.bucket.make_memory(self._group.empty)
        output = tensors[cut.bucket.names[0]].detach().view(-1) if message is None else message
        begin = sum(cut.sizes[:rank])
        part = output[begin : begin + cut.sizes[rank]]
        if message is not None:
            cut.parts[rank].pack(tensors, part)
        return message, self._group.start(AllGather(output, part, cut.sizes))


def _receive(tensors: Mapping[str, Tensor], cut: BucketCut, message: Tensor | None, work: AbstractWork) -> None:
    work.wait()
    if message is not None:
        write(tensors, cut.bucket.unpack(message))


def _are_same(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether two mappings hold the same objects: an executor may give its parameters in a new one every time."""
    return tensors.keys() == others.keys() and all(tensor is others[name] for name, tensor in tensors.items())


def _is_alone(cut: BucketCut, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a message can be received in the memory of its one tensor."""
    return len(cut.bucket.pieces) == 1 and tensors[cut.bucket.names[0]].is_contiguous()
