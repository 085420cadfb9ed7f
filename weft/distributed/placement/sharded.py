"""The optimizer's state split over ranks (ZeRO stage 1, Rajbhandari et al., 2020): each updates its own pieces.

    2 ranks, a bucket           [     w2      | b1 |      w1      ]
    gradients, on each          g  g  g  g  g  g  g  g  g  g  g  g         reduce-scatter
    rank 0                      s  s  s  s  s  s  |                        sums, optimizer state and update of this half
    rank 1                                        |  s  s  s  s  s  s      and of that half
    parameters, on each         w  w  w  w  w  w  w  w  w  w  w  w         all-gather

The bytes of a step are those of an all-reduce, which is a reduce-scatter and an all-gather. Every bucket is cut into as
many parts as there are ranks, so that all of them have as much to do whichever layer is on its way.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import Bucket, Piece, write
from weft.distributed.group import AbstractGroup, gather_parts
from weft.distributed.group.calls import AllGather
from weft.distributed.group.dense import as_bytes, make_dense
from weft.distributed.group.group import AbstractWork
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.placement.cut import cut_evenly, put_together
from weft.distributed.placement.torch_steps import TorchSteps
from weft.graph import AbstractExecutor
from weft.training.checkpoint import Cut, flat
from weft.training.gradients import joint_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.placement import AbstractPlacement

__all__ = ["BucketCut", "ShardedState", "cut_bucket"]


@dataclass(frozen=True)
class BucketCut:
    """A bucket, and the part of its message that each rank updates."""

    bucket: Bucket
    parts: tuple[Bucket, ...]  # by rank

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each part; they lie one after the other in the message."""
        return tuple(part.num_elements for part in self.parts)


def cut_bucket(bucket: Bucket, parameters: Mapping[str, Tensor], num_ranks: int) -> BucketCut:
    """Evenly, at places where an update of pieces has the bits of an update of the whole."""
    pieces = cut_evenly({name: parameters[name] for name in bucket.names}, num_ranks)
    return BucketCut(bucket, tuple(_part(own, parameters, bucket.dtype) for own in pieces))


def _part(pieces: Sequence[Piece], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> Bucket:
    shapes = tuple(tuple(piece.of(parameters[piece.name]).shape) for piece in pieces)
    return Bucket(tuple(pieces), shapes, dtype)


@final
class ShardedState(AbstractPlacement):
    """Every rank has the whole model, and one part of each bucket to update.

    Args:
        group: the ranks that hold the optimizer's state together.
    """

    def __init__(self, group: AbstractGroup) -> None:
        self._group = group
        self._parameters: Mapping[str, Tensor] = {}
        self._owned: dict[str, Tensor] = {}
        self._pieces: dict[str, Piece] = {}
        self.cuts: tuple[BucketCut, ...] = ()
        self.parts: list[Tensor] = []  # memory for this rank's part of each message: of sums, then of what follows them
        self._messages: list[Tensor | None] = []  # and for messages that are packed
        self._looks_ahead: bool | None = None  # the optimizer; None where nobody has asked

    def wrap(self, executor: AbstractExecutor) -> AbstractExecutor:
        return executor

    @property
    def has_loss(self) -> bool:
        return True

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

    def norm(self, norms: Sequence[Tensor]) -> Tensor:
        norm = joint_norm(norms)
        # In host memory, where a rank without a piece has its zero: a group may carry each device in another way.
        square = norm.cpu().double().square().reshape(1)
        self._group.all_reduce(square)
        return square.sqrt().squeeze().to(norm.device)

    @torch.no_grad()
    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        memory = zip(self.cuts, self.parts, self._messages, strict=True)
        works = [self._start_gather(*row, tensors) for row in memory]
        for cut, message, work in zip(self.cuts, self._messages, works, strict=True):
            work.wait()
            if message is not None:
                write(tensors, cut.bucket.unpack(message))
        return sum(part.nbytes for part in self.parts)

    def cut_of(self, name: str) -> Cut | None:
        """Of the optimizer's slots its pieces; one that is the whole of a tensor is no part of it."""
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0]
        parameter, piece = self._parameters.get(owner), self._pieces.get(owner)
        if kind != "slot" or parameter is None or (piece is not None and piece.is_whole(parameter)):
            return None
        return Cut(tuple(parameter.shape), flat(piece.begin, piece.end) if piece else flat(0, 0))

    def whole_state(self, state: OptimizerState) -> OptimizerState:
        slots: dict[str, dict[str, list[tuple[Piece, Tensor]]]] = {name: {} for name in self._parameters}
        for piece, slot, tensor in self._gather_slots(state):
            slots[piece.name].setdefault(slot, []).append((piece, tensor))
        whole = {
            name: {slot: put_together(found, self._parameters[name]) for slot, found in own.items()}
            for name, own in slots.items()
        }
        return replace(state, slots=whole)

    def _cut(self, parameters: Mapping[str, Tensor]) -> None:
        """Trained parameters bucket by bucket; those that are not trained, which nobody sends, all together."""
        size, rank = self._group.size, self._group.rank
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        frozen = {name: parameter for name, parameter in parameters.items() if name not in trained}
        self.cuts = tuple(cut_bucket(bucket, trained, size) for bucket in plan_buckets(trained))
        own = [piece for cut in self.cuts for piece in cut.parts[rank].pieces] + [*cut_evenly(frozen, size)[rank]]
        self._pieces = {piece.name: piece for piece in own}
        # In the model's order, in which an optimizer and its checkpoints have them.
        names = [name for name in parameters if name in self._pieces]
        self._owned = {name: self._pieces[name].of(parameters[name].detach()) for name in names}
        self._looks_ahead = None
        empty = self._group.empty
        self.parts = [cut.parts[rank].make_memory(empty) for cut in self.cuts]
        self._messages = [
            None if _is_alone(cut.bucket, parameters) else cut.bucket.make_memory(empty) for cut in self.cuts
        ]

    def _start_gather(
        self, cut: BucketCut, part: Tensor, message: Tensor | None, tensors: Mapping[str, Tensor]
    ) -> AbstractWork:
        cut.parts[self._group.rank].pack(tensors, part)
        output = tensors[cut.bucket.names[0]].detach().view(-1) if message is None else message
        return self._group.start(AllGather(output, part, cut.sizes))

    def _gather_slots(self, state: OptimizerState) -> list[tuple[Piece, str, Tensor]]:
        """The slots of all ranks, each with its piece."""
        own = [(self._pieces[n], slot, t) for n, slots in state.slots.items() for slot, t in slots.items()]
        rows = [
            (piece.name, piece.begin, piece.end, slot, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for piece, slot, tensor in own
        ]
        text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
        data = [as_bytes(make_dense(tensor).cpu()) for _, _, tensor in own]
        everyone = zip(
            gather_parts(self._group, text),
            gather_parts(self._group, torch.cat(data) if data else text[:0]),
            strict=True,
        )
        return [found for rows_of_rank, data_of_rank in everyone for found in _read_slots(rows_of_rank, data_of_rank)]


def _are_same(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether two mappings hold the same objects: an executor may give its parameters in a new one every time."""
    return tensors.keys() == others.keys() and all(tensor is others[name] for name, tensor in tensors.items())


def _is_alone(bucket: Bucket, parameters: Mapping[str, Tensor]) -> bool:
    """Whether a message can be received in the memory of its one parameter."""
    return len(bucket.pieces) == 1 and parameters[bucket.names[0]].is_contiguous()


def _read_slots(text: Tensor, data: Tensor) -> list[tuple[Piece, str, Tensor]]:
    found, begin = [], 0
    for name, first, last, slot, dtype, shape in json.loads(bytes(text.tolist())):
        kind: torch.dtype = getattr(torch, dtype)
        end = begin + math.prod(shape) * kind.itemsize
        found.append((Piece(name, first, last), slot, data[begin:end].clone().view(kind).view(shape)))
        begin = end
    return found
