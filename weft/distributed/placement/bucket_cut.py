"""A bucket cut into as many parts as there are ranks, each of which updates one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weft.distributed.codecs import Bucket, Piece
from weft.distributed.placement.cut import cut_evenly

__all__ = ["BucketCut", "cut_bucket"]


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
    shapes = tuple(_shape(piece, parameters[piece.name]) for piece in pieces)
    return Bucket(tuple(pieces), shapes, dtype)


def _shape(piece: Piece, parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape) if piece.is_whole(parameter) else (piece.end - piece.begin,)
