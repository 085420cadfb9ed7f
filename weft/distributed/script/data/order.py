"""The batches of an epoch: drawn by rank 0 with the script's own sampler and generator, known to all."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.calls.carrying import broadcast_value

__all__ = ["Order", "draw_one_by_one", "draw_order"]


@dataclass(frozen=True)
class Order:
    """Batches of indices, as numbers, or whatever else a data set takes (texts, tuples)."""

    batches: Sequence[list[Any]]

    def to_state(self, first: int = 0) -> dict[str, Any]:
        """The batches from `first` on, as tensors and plain values."""
        batches = self.batches[first:]
        indices = list(chain.from_iterable(batches))
        if not set(map(type, indices)) <= {int}:
            return {"batches": [list(batch) for batch in batches]}
        sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
        return {"indices": torch.tensor(indices, dtype=torch.int64), "sizes": sizes}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Order":
        """As it was.

        >>> Order.from_state(Order([[3, 1], [0, 2]]).to_state(1))
        Order(batches=[[0, 2]])
        """
        if "batches" in state:
            return cls(state["batches"])
        return cls([part.tolist() for part in state["indices"].split(state["sizes"].tolist())])


def draw_order(group: AbstractGroup, batches: Iterable[Iterable[Any]]) -> Order:
    """All batches of a sampler that has an end. A collective call."""
    if group.size == 1:
        return Order([_indices(batch) for batch in batches])
    own = Order([_indices(batch) for batch in batches] if group.rank == 0 else [])
    state = broadcast_value(group, own.to_state() if group.rank == 0 else None)
    return own if group.rank == 0 else Order.from_state(state)


def draw_one_by_one(
    group: AbstractGroup, batches: Iterable[Iterable[Any]], waiting: AbstractContextManager[None]
) -> Iterator[list[Any]]:
    """The batches of a sampler that may have no end; each is a collective call, during which `waiting` is held."""
    own = iter(batches) if group.rank == 0 else iter(())
    while True:
        batch = next(own, None)
        with waiting:
            drawn = broadcast_value(group, None if batch is None else _indices(batch))
        if drawn is None:
            return
        yield drawn


def _indices(batch: Iterable[Any]) -> list[Any]:
    if isinstance(batch, list) and set(map(type, batch)) <= {int}:  # as nearly all are, and this is each step's
        return batch
    return [operator.index(index) if hasattr(index, "__index__") else index for index in batch]
