"""Named tensors packed into messages: one packing for gradients, weights and pieces of them, whoever carries them.

tensors      w1 (float32)   b1 (float32)   scale (float64)
buckets      [ w1 | b1 ]                   [ scale ]            each one flat message, of one type
             packed                        alone: the tensor itself, never copied

All-reduce fills buckets in backward's order (placement/buckets.py); weights of a rank travel in one bucket for each
type; what a shard of a server holds are pieces of tensors, each a bucket of its own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

__all__ = ["Bucket", "Empty", "PackedTensors", "Piece", "bucket_by_type", "bucket_of", "bucket_pieces", "write"]

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes memory, uninitialised: `empty` of a group or of a mailbox, whose transport can read it in place."""


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `end` of a tensor, in the order of its memory."""

    name: str
    begin: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor: the tensor itself where it is the whole, else flat."""
        return tensor if self.is_whole(tensor) else tensor.reshape(-1)[self.begin : self.end]

    def is_whole(self, tensor: Tensor) -> bool:
        return self.begin == 0 and self.end == tensor.numel()


@dataclass(frozen=True)
class Bucket:
    """Pieces of tensors of one type that travel as one message, at most one piece of each tensor; there may be none,
    where a message is cut into parts.

    Args:
        shapes: of the pieces; that of its tensor for one that is the whole.
    """

    pieces: tuple[Piece, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each piece; they lie one after the other."""
        return tuple(piece.end - piece.begin for piece in self.pieces)

    @cached_property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def make_memory(self, empty: Empty) -> Tensor:
        """One flat tensor to pack into."""
        return empty((self.num_elements,), self.dtype)

    def pack(self, tensors: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        """The message of these tensors.

        Args:
            tensors: by name, of which the pieces are taken.
            into: flat memory; None sends the one piece of a bucket in place, in its own shape.
        """
        parts = [piece.of(tensors[piece.name]) for piece in self.pieces]
        if into is None:
            assert len(parts) == 1, "several pieces need memory to be packed into"
            return parts[0].contiguous()
        return torch.cat([part.reshape(-1) for part in parts], out=into) if parts else into

    def unpack(self, message: Tensor) -> dict[str, Tensor]:
        """The pieces in a message, as views of it, by name."""
        if len(self.pieces) == 1:
            return {self.names[0]: message.view(self.shapes[0])}
        parts = message.split(self.sizes)
        return {n: part.view(shape) for n, part, shape in zip(self.names, parts, self.shapes, strict=True)}

    def accepts(self, message: Tensor) -> bool:
        """Whether a message is of the size and type of this bucket."""
        return message.numel() == self.num_elements and message.dtype == self.dtype


def bucket_of(tensors: Mapping[str, Tensor]) -> Bucket:
    """Whole tensors of one type, in their order.

    >>> bucket = bucket_of({"w": torch.ones(2, 2), "b": torch.zeros(3)})
    >>> bucket.names, bucket.num_elements
    (('w', 'b'), 7)
    """
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    pieces = tuple(Piece(name, 0, tensor.numel()) for name, tensor in tensors.items())
    return Bucket(pieces, tuple(tuple(tensor.shape) for tensor in tensors.values()), dtype)


def bucket_by_type(tensors: Mapping[str, Tensor]) -> tuple[Bucket, ...]:
    """Whole tensors, one bucket for each type."""
    by_type: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_type.setdefault(tensor.dtype, {})[name] = tensor
    return tuple(map(bucket_of, by_type.values()))


def bucket_pieces(pieces: Iterable[Piece], tensors: Mapping[str, Tensor]) -> tuple[Bucket, ...]:
    """One bucket for each piece, where a transport takes several messages at once."""
    found = [(piece, piece.of(tensors[piece.name])) for piece in pieces]
    return tuple(Bucket((piece,), (tuple(part.shape),), part.dtype) for piece, part in found)


@final
class PackedTensors:
    """Memory for tensors of these shapes, one flat message for each type; `tensors` are views of it.

    Args:
        tensors: of which it begins as a copy.
        empty: makes the memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], empty: Empty) -> None:
        self.buckets = bucket_by_type(tensors)
        self.messages = [bucket.make_memory(empty) for bucket in self.buckets]
        self.tensors = self.views_of(self.messages)
        self.num_bytes = sum(message.nbytes for message in self.messages)
        write(self.tensors, tensors)

    def views_of(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors in messages like these, by name."""
        views: dict[str, Tensor] = {}
        for bucket, message in zip(self.buckets, messages, strict=True):
            views |= bucket.unpack(message)
        return views


@torch.no_grad()
def write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write the values into the tensors of the same names."""
    for name, value in values.items():
        tensors[name].copy_(value)
