"""Flat memory of a block's parameters: whole while they are needed, else this rank's piece of it.

    in a step     [ w (6, 4)            | b (6) ]      whole: each parameter is a view of it
    between       [ piece of rank 0 |                  a parameter is what lies in the piece: some of its elements,
                                    | of rank 1 ]      flat, all of it, or none

Memory for wholes is lent by a pool, which keeps that of blocks that were let go for those that come next; or a flat
keeps its own, and its piece is a part of that.
"""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn

from weft.distributed.codecs import Piece
from weft.distributed.group.calls import AllGather
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.placement.bucket_cut import BucketCut

__all__ = ["Flat", "MemoryPool"]


@final
class MemoryPool:
    """Flat memory, lent and given back.

    Args:
        most_bytes: that are kept for the next borrower.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: list[Tensor] = []

    def lend(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for index, memory in enumerate(self._free):
            if (memory.numel(), memory.dtype, memory.device) == (num_elements, dtype, device):
                return self._free.pop(index)
        return torch.empty(num_elements, dtype=dtype, device=device)

    def take_back(self, memory: Tensor) -> None:
        self._free.append(memory)
        while sum(free.nbytes for free in self._free) > self._most_bytes:
            self._free.pop(0)

    def clear(self) -> None:
        """Nobody borrows before the next step."""
        self._free.clear()

    def memory(self) -> list[Tensor]:
        """That waits for a borrower."""
        return list(self._free)


@final
class Flat:
    """Parameters of one block, type and set of ranks. Their `data` is exchanged; they stay the objects they are.

    Args:
        cut: of all of them, by ranks of the group.
        parameters: by name; their values are taken from here.
        pool: lends memory for the whole; None where it is kept.
    """

    def __init__(
        self, group: AbstractGroup, cut: BucketCut, parameters: Mapping[str, nn.Parameter], pool: MemoryPool | None
    ) -> None:
        self.cut = cut
        self.parameters = [parameters[name] for name in cut.bucket.names]
        self._group = group
        self._pool = pool
        self._placeholders = [_placeholder(parameter) for parameter in self.parameters]
        self._work: AbstractWork | None = None
        self.whole: Tensor | None = None
        values = cut.bucket.pack({name: parameters[name].detach() for name in cut.bucket.names}, self._memory(pool))
        self._kept = values if pool is None else None
        self.piece = self._own(values) if pool is None else _moved(self._own(values), group)
        self.pieces = self._pieces()
        self.lay_pieces()

    def keep_memory(self) -> None:
        """From now on, of which the piece becomes a part. Whoever has seen its pieces before has others."""
        if self._pool is not None:
            self._pool = None
            self._kept = self._memory(None)
            self.piece = self._own(self._kept).copy_(self.piece)
            self.pieces = self._pieces()
            self.lay_pieces()

    @property
    def names(self) -> tuple[str, ...]:
        return self.cut.bucket.names

    @property
    def is_whole(self) -> bool:
        return self.whole is not None and self._work is None

    @property
    def is_asked_for(self) -> bool:
        return self.whole is not None

    def ask(self) -> None:
        """Start to gather. A collective call."""
        self.whole = self._kept if self._pool is None else self._memory(self._pool)
        assert self.whole is not None, "kept, or lent"
        self._work = self._group.start(AllGather(self.whole, self.piece, self.cut.sizes))

    def wait(self) -> None:
        """Until parameters are whole."""
        assert self.whole is not None and self._work is not None, "asked for before"
        self._work.wait()
        self._work = None
        for parameter, view in zip(self.parameters, self._views(self.whole), strict=True):
            parameter.data = view

    def let_go(self) -> None:
        """Nobody needs the whole for now. What is computed with it all the same is not a number."""
        if self.is_asked_for:
            self._give_back()
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder

    def lay_pieces(self) -> None:
        """The step is over: parameters are what this rank has of them."""
        if self.is_asked_for:
            self._give_back()
        for parameter, name in zip(self.parameters, self.names, strict=True):
            parameter.data = self.pieces[name]

    def forget(self) -> None:
        """A gather that is under way, and the memory that it may still write to."""
        self._work = self.whole = None

    def memory(self) -> list[Tensor]:
        return [self.piece, *([] if self.whole is None else [self.whole])]

    def _give_back(self) -> None:
        if self._work is not None:
            self._work.wait()  # it would write into memory of others
            self._work = None
        if self._pool is not None and self.whole is not None:
            self._pool.take_back(self.whole)
        self.whole = None

    def _memory(self, pool: MemoryPool | None) -> Tensor:
        bucket, device = self.cut.bucket, self.parameters[0].device
        if pool is not None:
            return pool.lend(bucket.num_elements, bucket.dtype, device)
        return self._group.empty((bucket.num_elements,), bucket.dtype)

    def _views(self, whole: Tensor) -> list[Tensor]:
        bucket = self.cut.bucket
        return [part.view(shape) for part, shape in zip(whole.split(bucket.sizes), bucket.shapes, strict=True)]

    def _own(self, whole: Tensor) -> Tensor:
        begin = sum(self.cut.sizes[: self._group.rank])
        return whole[begin : begin + self.cut.sizes[self._group.rank]]

    def _pieces(self) -> dict[str, Tensor]:
        """Of every parameter; an empty one where this rank has nothing of it."""
        own = self.cut.parts[self._group.rank]
        held = own.unpack(self.piece) if own.pieces else {}
        return {name: held.get(name, self.piece[:0]) for name in self.names}

    def piece_of(self, name: str) -> Piece | None:
        return next((piece for piece in self.cut.parts[self._group.rank].pieces if piece.name == name), None)


def _placeholder(parameter: Tensor) -> Tensor:
    """Of the same shape, in the memory of one element."""
    return torch.full((1,), math.nan).to(parameter).expand(parameter.shape)


def _moved(tensor: Tensor, group: AbstractGroup) -> Tensor:
    """In memory that the transport reads in place."""
    return group.empty((tensor.numel(),), tensor.dtype).copy_(tensor)
