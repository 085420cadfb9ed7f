"""Calls of the hierarchical group as stages: inside the host, between hosts, inside the host again."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call, Sizes
from weft.distributed.group.dense import copy_back, make_dense, part_lengths

__all__ = ["COLUMN", "FIRST_ROW", "SECOND_ROW", "Grid", "Stages", "stages_of"]

# A call goes through at most three stages, each over a group of its own: whatever a rank waits for first, every group
# sees the calls in the order in which they were started.
FIRST_ROW, COLUMN, SECOND_ROW = range(3)

Stages = Generator[tuple[int, Call], None, None]


@dataclass(frozen=True, slots=True)
class Grid:
    """A rank's row (host) and column, among so many of each."""

    row: int
    column: int
    num_rows: int
    num_columns: int

    @property
    def rank(self) -> int:
        return self.row * self.num_columns + self.column

    @property
    def size(self) -> int:
        return self.num_rows * self.num_columns


@dataclass(frozen=True, slots=True)
class _Cut:
    """Elements of every rank's part, of every column's parts, of each part of this column; None for equal ones."""

    lengths: Sizes | None
    columns: Sizes | None
    rows: Sizes | None
    of_column: int  # elements of this column's parts together


def stages_of(call: Call, grid: Grid) -> Stages:
    """The stages of a collective call: yields the stage and its call, and is resumed when that is done."""
    return _STAGES[type(call)](call, grid)


def _all_reduce(call: calls.AllReduce, grid: Grid) -> Stages:
    dense, size = make_dense(call.tensor), call.tensor.numel()
    length = -(-size // grid.num_columns)
    padded = dense if length * grid.num_columns == size else _pad(dense, length * grid.num_columns)
    part = dense.new_empty(length)
    op = "sum" if call.op == "mean" else call.op
    yield FIRST_ROW, calls.ReduceScatter(part, padded, op)
    yield COLUMN, calls.AllReduce(part, op)
    if call.op == "mean":
        part.div_(grid.size)
    yield SECOND_ROW, calls.AllGather(padded, part)
    copy_back(call.tensor, padded[:size])


def _reduce_scatter(call: calls.ReduceScatter, grid: Grid) -> Stages:
    op = "sum" if call.op == "mean" else call.op
    cut = _cut(call.tensor, call.sizes, grid)
    by_column = _swap(make_dense(call.tensor), grid.num_rows, grid.num_columns, cut.lengths)
    parts = by_column.new_empty(cut.of_column)
    output = by_column.new_empty(call.output.numel())
    yield FIRST_ROW, calls.ReduceScatter(parts, by_column, op, cut.columns)
    yield COLUMN, calls.ReduceScatter(output, parts, op, cut.rows)
    if call.op == "mean":
        output.div_(grid.size)
    copy_back(call.output, output)


def _all_gather(call: calls.AllGather, grid: Grid) -> Stages:
    dense, cut = make_dense(call.tensor), _cut(call.output, call.sizes, grid)
    of_column = dense.new_empty(cut.of_column)
    by_column = dense.new_empty(call.output.numel())
    yield COLUMN, calls.AllGather(of_column, dense, cut.rows)
    yield SECOND_ROW, calls.AllGather(by_column, of_column, cut.columns)
    copy_back(call.output, _swap(by_column, grid.num_columns, grid.num_rows, _by_column(cut.lengths, grid)))


def _all_to_all(call: calls.AllToAll, grid: Grid) -> Stages:
    by_column = _swap(make_dense(call.tensor), grid.num_rows, grid.num_columns)
    from_row, output = torch.empty_like(by_column), torch.empty_like(by_column)
    yield FIRST_ROW, calls.AllToAll(from_row, by_column)
    yield COLUMN, calls.AllToAll(output, _swap(from_row, grid.num_columns, grid.num_rows))
    copy_back(call.output, output)


def _broadcast(call: calls.Broadcast, grid: Grid) -> Stages:
    row, column = divmod(call.root, grid.num_columns)
    if grid.column == column:
        yield COLUMN, calls.Broadcast(call.tensor, row)
    yield SECOND_ROW, calls.Broadcast(call.tensor, column)


def _reduce(call: calls.Reduce, grid: Grid) -> Stages:
    row, column = divmod(call.root, grid.num_columns)
    total, op = make_dense(call.tensor).clone(), "sum" if call.op == "mean" else call.op
    yield FIRST_ROW, calls.Reduce(total, column, op)
    if grid.column == column:
        yield COLUMN, calls.Reduce(total, row, op)
    if grid.rank == call.root:
        copy_back(call.tensor, total.div_(grid.size) if call.op == "mean" else total)


def _barrier(call: calls.Barrier, grid: Grid) -> Stages:
    yield FIRST_ROW, call
    yield COLUMN, call


_STAGES: dict[type, Callable[[Any, Grid], Stages]] = {
    calls.AllGather: _all_gather,
    calls.AllReduce: _all_reduce,
    calls.AllToAll: _all_to_all,
    calls.Barrier: _barrier,
    calls.Broadcast: _broadcast,
    calls.Reduce: _reduce,
    calls.ReduceScatter: _reduce_scatter,
}


def _cut(whole: Tensor, sizes: Sizes | None, grid: Grid) -> _Cut:
    if sizes is None:
        return _Cut(None, None, None, whole.numel() // grid.num_columns)
    lengths = part_lengths(whole, sizes)
    columns = tuple(sum(lengths[column :: grid.num_columns]) for column in range(grid.num_columns))
    return _Cut(lengths, columns, lengths[grid.column :: grid.num_columns], columns[grid.column])


def _by_column(lengths: Sizes | None, grid: Grid) -> Sizes | None:
    """Parts that lie row by row, column by column instead."""
    if lengths is None:
        return None
    return tuple(length for column in range(grid.num_columns) for length in lengths[column :: grid.num_columns])


def _swap(parts: Tensor, num_rows: int, num_columns: int, lengths: Sizes | None = None) -> Tensor:
    """Parts that lie row by row, column by column instead."""
    if lengths is None:
        return parts.view(num_rows, num_columns, -1).transpose(0, 1).contiguous().view(-1)
    pieces = parts.split(lengths)
    return torch.cat([piece for column in range(num_columns) for piece in pieces[column::num_columns]])


def _pad(dense: Tensor, length: int) -> Tensor:
    padded = dense.new_zeros(length)
    padded[: dense.numel()] = dense
    return padded
