"""Small sums over workers, kept until all that are left have given their part."""

from collections.abc import Collection, Iterator
from typing import final

import torch
from torch import Tensor

__all__ = ["Sums"]


@final
class Sums:
    """Numbered, so that a worker may be one sum ahead of another."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Tensor]] = {}  # number of the sum -> rank -> its part
        self.has_begun = False
        self._latest: dict[int, int] = {}  # rank -> the last sum that it gave a part of

    def accepts(self, number: int, part: Tensor) -> bool:
        return all(known.shape == part.shape for known in self._parts.get(number, {}).values())

    def add(self, number: int, rank: int, part: Tensor) -> None:
        self.has_begun = True
        self._parts.setdefault(number, {})[rank] = part
        self._latest[rank] = max(number, self._latest.get(rank, number))

    def take_whole(self, waited_for: Collection[int]) -> Iterator[tuple[int, list[int], Tensor]]:
        """Each sum that is there: its number, its ranks, and the total, added in their order.

        A rank that is at a later sum had its total from a server that is lost since, and does not give its part again.
        """
        for number, parts in list(self._parts.items()):
            if all(self._latest.get(rank, -1) >= number for rank in waited_for):
                ranks = sorted(parts)
                yield number, ranks, torch.stack([parts[rank] for rank in ranks]).sum(0)
                del self._parts[number]
