"""Rows of all ranks gathered, and one product made of them.

    begin of backward    every rank tells how many rows it has for each weight     one gather of whole numbers
    rank 0   | x | dy |  --.
    rank 1   | x | dy |  --+-->  X, dY of all ranks, in their order  -->  dW = dY^T X, on every rank to the same bits
             | x | dy |  --'

Where the rows of all are no fewer bytes than the gradient, or a rank says that it will have none, every rank makes the
product of its own, and these are added up. What a rank has beside its rows (a weight that is also used by other means)
is added up at the end of the step, once one rank has said that there is some.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllGather, AllReduce
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.recording import handed_bytes, wire_bytes
from weft.distributed.placement.factors.layers import DENSE, FactoredLayers, FactoredWeight

__all__ = ["FactorExchange"]


@final
class FactorExchange:
    """Of one group, step after step: `announce` when the first gradient is there, `start` for each weight in one order
    on all ranks, and `wait` of what that gave."""

    def __init__(self, group: AbstractGroup, layers: FactoredLayers) -> None:
        self._group = group
        self._layers = layers
        self._announced: AbstractWork | None = None
        self._own = torch.empty(0, dtype=torch.int64)
        self._counts = torch.empty(group.size, len(layers.weights), dtype=torch.int64)
        self._sizes: dict[str, tuple[int, ...]] = {}  # by weight, rows of each rank
        self._memory: dict[str, Tensor] = {}  # for the rows of all ranks
        self.num_bytes = 0
        """That this rank has sent in this step."""
        self.wire_bytes = 0
        """That left it for them."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._layers.weights)

    def begin(self) -> None:
        self._announced, self._sizes, self.num_bytes, self.wire_bytes = None, {}, 0, 0

    def announce(self, weight: float) -> None:
        """Tell the others how many rows to expect; once in a step. A rank whose samples do not count has none."""
        if self._announced is None:
            counts = [entry.count() if weight else 0 for entry in self._layers.weights.values()]
            self._own = torch.tensor([counts], dtype=torch.int64)
            self._announced = self._start(AllGather(self._counts, self._own))

    def is_agreed(self) -> bool:
        """Whether all ranks have told. To ask is also what moves some groups on."""
        return bool(self._sizes) or (self._announced is not None and self._announced.is_done())

    def agree(self) -> None:
        """Wait until all ranks have told."""
        assert self._announced is not None, "announce() comes first"
        self._announced.wait()
        columns: list[list[int]] = self._counts.t().tolist()
        self._sizes = {name: tuple(column) for name, column in zip(self.names, columns, strict=True)}

    def start(self, name: str, weight: float) -> "PendingProduct":
        """Send this rank's rows of a weight, or their product.

        Args:
            weight: with which they count.
        """
        if not self._sizes:
            self.agree()
        entry, sizes = self._layers.weights[name], self._sizes[name]
        rows = entry.take() if weight else entry.take()[:0]
        if weight != 1.0:
            rows[:, entry.shape.num_inputs :].mul_(weight)
        if DENSE in sizes or not entry.shape.sends_factors(sum(sizes)):
            product = entry.multiply(rows)
            return PendingProduct(self._start(AllReduce(product)), lambda total: _add(product, total), len(rows))
        num_expected = sizes[self._group.rank]
        sent = _exactly(rows, num_expected)
        everyone = self._memory_for(entry, sum(sizes))
        work = self._start(AllGather(everyone, sent, sizes)) if len(everyone) else None
        return PendingProduct(
            work, lambda total: entry.multiply(everyone, total), len(rows), entry, rows[num_expected:]
        )

    def _start(self, call: AllGather | AllReduce) -> AbstractWork:
        self.num_bytes += handed_bytes(call)
        self.wire_bytes += wire_bytes(call, self._group.rank, self._group.size)
        return self._group.start(call)

    def _memory_for(self, entry: FactoredWeight, num_rows: int) -> Tensor:
        """For so many rows of all ranks; the same from step to step, as long as it is enough."""
        kept = self._memory.get(entry.name)
        if kept is None or len(kept) < num_rows:
            self._memory.pop(entry.name, None)
            kept = self._memory[entry.name] = self._group.empty((num_rows, entry.shape.width), entry.weight.dtype)
        return kept[:num_rows]

    def memory(self) -> list[Tensor]:
        """That it has now: for rows, its own and of all ranks."""
        waiting = [block for entry in self._layers.weights.values() for block in entry.blocks]
        return [*self._memory.values(), *waiting]


@final
class PendingProduct:
    """The gradient of a weight under way.

    Attributes:
        num_rows: that this rank had.
        base: a tensor that the gradient is added to, in place; None for none.
    """

    def __init__(
        self,
        work: AbstractWork | None,
        make: Callable[[Tensor | None], Tensor],
        num_rows: int,
        entry: FactoredWeight | None = None,
        surplus: Tensor | None = None,
    ) -> None:
        self._work = work
        self._make = make
        self._entry = entry
        self._surplus = surplus
        self.num_rows = num_rows
        self.base: Tensor | None = None
        self.computed = 0.0  # a product is a part of backward
        self.num_bytes = self.wire_bytes = 0  # the exchange counts them

    @property
    def num_surplus(self) -> int:
        """Rows that this rank had not told of: they are not in the sum."""
        return 0 if self._surplus is None else len(self._surplus)

    def add_surplus(self, total: Tensor) -> None:
        """Add their product, in place."""
        if self._entry is not None and self._surplus is not None and len(self._surplus):
            self._entry.multiply(self._surplus, total)

    def is_done(self) -> bool:
        return self._work is None or self._work.is_done()

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._make(self.base)


def _exactly(rows: Tensor, number: int) -> Tensor:
    """So many rows: those that backward did not come to are zero, and those that nobody was told of are left out."""
    if len(rows) >= number:
        return rows[:number]
    return torch.cat((rows, rows.new_zeros((number - len(rows), rows.shape[1]))))


def _add(product: Tensor, total: Tensor | None) -> Tensor:
    return product if total is None else total.add_(product)
