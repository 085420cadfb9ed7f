"""Offers: the parts that ranks could write, and who writes which.

Most tensors are held in parts that several ranks hold alike, or that lie side by side. Where two overlap and differ,
such as a tied weight that one stage of a pipeline has whole and another in halves, the rest of the smaller one counts:

    offered    [0:8]  [0:4]  [4:8]            written    [0:8]
    offered    [0:6]  [4:8]                   written    [0:6]  [6:8]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.training.checkpoint.entry import Kind
from weft.training.checkpoint.index import key_of
from weft.training.checkpoint.part import Part, boxes_of, copy_overlaps, overlaps, subtract

__all__ = ["Offer", "assign_writers", "cut_out", "without_overlaps"]


@dataclass(frozen=True)
class Offer:
    """A chunk that a rank has, and could write.

    Args:
        owner: the replica whose tensor it is; None of a global one.
    """

    name: str
    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    owner: int | None
    part: Part

    @property
    def num_bytes(self) -> int:
        return self.part.size * self.dtype.itemsize

    @property
    def key(self) -> str:
        return key_of(self.name, self.part, self.shape)

    def to_json(self) -> list[Any]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [self.name, self.kind, dtype, self.shape, self.owner, self.part.offset, self.part.length]

    @staticmethod
    def from_json(data: Sequence[Any]) -> "Offer":
        name, kind, dtype, shape, owner, offset, length = data
        return Offer(name, kind, getattr(torch, dtype), tuple(shape), owner, Part(tuple(offset), tuple(length)))


def assign_writers(offers: Mapping[int, Sequence[Offer]]) -> dict[Offer, int]:
    """Who writes what: of the ranks that have a chunk the one with the fewest bytes so far, the largest chunks first.

    Args:
        offers: by rank.
    """
    holders: dict[Offer, list[int]] = {}
    for rank, own in offers.items():
        for offer in own:
            holders.setdefault(offer, []).append(rank)
    num_bytes = dict.fromkeys(offers, 0)
    writers: dict[Offer, int] = {}
    for offer, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0].num_bytes)):
        writers[offer] = min(ranks, key=lambda rank: (num_bytes[rank], rank))
        num_bytes[writers[offer]] += offer.num_bytes
    return writers


def without_overlaps(offers: Mapping[int, Sequence[Offer]]) -> dict[int, dict[Offer, Offer]]:
    """By rank what it could write, and the offer that each is a part of; no two differ and overlap.

    Args:
        offers: by rank.
    """
    of_tensor: dict[tuple[str, int | None], dict[Offer, None]] = {}
    for own in offers.values():
        for offer in own:
            of_tensor.setdefault((offer.name, offer.owner), {})[offer] = None
    rest = {offer: parts for same in of_tensor.values() for offer, parts in _disjoint(list(same)).items()}
    return {
        rank: {replace(offer, part=part): offer for offer in own for part in rest[offer]}
        for rank, own in offers.items()
    }


def cut_out(tensor: Tensor, offer: Offer, chunk: Offer) -> Tensor:
    """A chunk from the tensor that was offered."""
    if chunk == offer:
        return tensor
    target = torch.empty(chunk.part.length, dtype=tensor.dtype, device=tensor.device)
    copy_overlaps(overlaps(chunk.part, offer.part, offer.shape), target, tensor.contiguous())
    return target


def _disjoint(same: Sequence[Offer]) -> dict[Offer, list[Part]]:
    """The parts of each offer of a tensor that those larger than it lack."""
    if sum(offer.part.size for offer in same) <= prod(same[0].shape):
        return {offer: [offer.part] for offer in same}
    taken: list[Part] = []
    parts: dict[Offer, list[Part]] = {}
    for offer in sorted(same, key=lambda offer: (-offer.part.size, offer.part.offset)):
        boxes = boxes_of(offer.part, offer.shape)
        left = boxes
        for other in taken:
            left = [rest for box in left for rest in subtract(box, other)]
        taken += left
        parts[offer] = [offer.part] if left == boxes else left
    return parts
