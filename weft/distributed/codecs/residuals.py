"""Tensors that a codec keeps beside its messages, such as the parts of gradients that were not sent.

message        [ w2 | b1 | w1, first half ]   [ w1, second half ]        buckets, as they travel
kept           [    |    |                ]   [                 ]        one flat tensor beside each
checkpoint     w2, b1, w1                                                whole tensors, by name

A run that goes on with other buckets (another number of shards, another packing) finds its pieces again by name.
"""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.codec import Kept
from weft.distributed.codecs.packing import Bucket, Piece

__all__ = ["Residuals", "working_type"]


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers are kept and encoded: small steps would be lost in 16 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@final
class Residuals:
    """Of one codec and one use, zero at first."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Piece, ...], Tensor] = {}
        self._buckets: dict[tuple[Piece, ...], Bucket] = {}
        self._restored: dict[str, Tensor] = {}

    def beside(self, bucket: Bucket, device: torch.device) -> Tensor:
        """Flat, of the bucket's elements, in the type that it works in; to be written in place."""
        kept = self._kept.get(bucket.pieces)
        if kept is None:
            kept = torch.zeros(bucket.num_elements, dtype=working_type(bucket.dtype), device=device)
            for piece, place in zip(bucket.pieces, kept.split(bucket.sizes), strict=True):
                if piece.name in self._restored:
                    place.copy_(self._restored[piece.name].reshape(-1)[piece.begin : piece.end])
            self._kept[bucket.pieces], self._buckets[bucket.pieces] = kept, bucket
        return kept

    def is_waiting(self, name: str) -> bool:
        """Whether anything of this tensor was not sent."""
        parts = [kept for piece, kept in self._pieces() if piece.name == name]
        if not parts and name in self._restored:
            parts = [self._restored[name]]
        return any(bool(part.any()) for part in parts)

    def drop_unfit(self, bucket: Bucket) -> None:
        """Let go of what is not finite: the step in which it came was told, and later ones are none the worse."""
        kept = self._kept.get(bucket.pieces)
        if kept is not None:
            kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def by_name(self) -> dict[str, Tensor]:
        """Whole tensors: of one that travels in pieces they are put together, flat. One of which nothing was sent since
        it was restored is as it was."""
        found = dict(self._restored)
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        for piece, part in self._pieces():
            pieces.setdefault(piece.name, []).append((piece.begin, part))
        for name, parts in pieces.items():
            parts.sort(key=lambda part: part[0])
            found[name] = parts[0][1] if len(parts) == 1 else torch.cat([part.reshape(-1) for _, part in parts])
        return found

    def _pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        for key, kept in self._kept.items():
            bucket = self._buckets[key]
            yield from zip(bucket.pieces, bucket.unpack(kept).values(), strict=True)

    def as_memory(self, prefix: str) -> dict[str, Kept]:
        """In the memory of a codec, whose names begin so."""
        return {prefix + name: Kept(tensor) for name, tensor in self.by_name().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with these; the others begin with zero."""
        self._kept, self._buckets = {}, {}
        self._restored = dict(tensors)

    def restore_from(self, memory: Mapping[str, Tensor], prefix: str) -> None:
        """Go on with those of a codec's memory whose names begin so."""
        self.restore({key.removeprefix(prefix): tensor for key, tensor in memory.items() if key.startswith(prefix)})
