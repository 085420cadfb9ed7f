"""Weights in flight to workers: an update must not touch them, and needs other memory to be made in.

weights A   sent to rank 0 ~~~~~~~~~~~> read          an update comes while A is read: it is made on B,
weights B             updated, sent to rank 1 ~~~>    and A, once it has been read, takes the next
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from weft.distributed.group.group import AbstractWork

__all__ = ["InFlight"]


@final
class InFlight:
    """Knows the sends that read each set of weights, and the sets that no send reads any more."""

    def __init__(self) -> None:
        self._read: list[tuple[tuple[Tensor, ...], list[AbstractWork]]] = []
        self._free: list[tuple[Tensor, ...]] = []

    def add(self, weights: tuple[Tensor, ...], work: AbstractWork) -> None:
        """A send reads these weights."""
        for known, works in self._read:
            if _are_same(known, weights):
                works.append(work)
                return
        self._read.append((weights, [work]))

    def is_read(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether some send still reads these; sets that are read no more are free from now on."""
        still = []
        for known, works in self._read:
            left = [work for work in works if not work.is_done()]
            if left:
                still.append((known, left))
            elif not _are_same(known, weights):
                self._free.append(known)
        self._read = still
        return any(_are_same(known, weights) for known, _ in still)

    def take_free(self) -> tuple[Tensor, ...] | None:
        """A set that may be written to; None where a new one is needed."""
        return self._free.pop() if self._free else None


def _are_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(a is b for a, b in zip(first, second, strict=True))
