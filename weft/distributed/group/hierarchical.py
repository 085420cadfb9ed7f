"""Two transports as one group: a fast one inside each host, another between hosts.

host 0:  0  1       Ranks count host by host, the same number on each. Rank r sits at row r // L, column r % L.
host 1:  2  3       `inside` joins a row; a column is cut out of `whole`, which joins all.
         |  |
      columns       Every column carries its share between hosts, so each byte crosses once for each host.
"""

from collections.abc import Callable, Generator
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import AbstractClock
from weft.distributed.group.dense import copy_back, make_dense
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.errors import PeerLostError, UsageError

__all__ = ["HierarchicalGroup"]

# A call goes through at most three stages, each over a group of its own: whatever a rank waits for first, every group
# sees the calls in the order in which they were started.
FIRST_ROW, COLUMN, SECOND_ROW = range(3)

Stages = Generator[tuple[int, Call], None, None]


@final
class HierarchicalGroup(AbstractGroup):
    """Built from any two groups: one of the ranks on this host, one of all ranks. It closes both.

    A reduction adds up inside each host, then between hosts; all ranks get the same bits. Messages between hosts, and
    calls between neighbours, go over `whole`. Calls advance while the rank starts, asks or waits for any of them.
    """

    def __init__(self, inside: AbstractGroup, whole: AbstractGroup) -> None:
        _check_order(inside, whole)
        self._inside, self._whole = inside, whole
        self._num_rows, self._num_columns = whole.size // inside.size, inside.size
        self._row, self._column = divmod(whole.rank, inside.size)
        column = whole.split(self._column, self._row)
        self._stages = (inside, column, inside.split(0, inside.rank))
        self._under_way: list[_StagedWork] = []
        self._lost: PeerLostError | None = None

    @property
    def rank(self) -> int:
        return self._whole.rank

    @property
    def size(self) -> int:
        return self._whole.size

    @property
    def generation(self) -> int:
        return self._whole.generation

    @property
    def clock(self) -> AbstractClock:
        return self._whole.clock

    def start(self, call: Call) -> AbstractWork:
        check_call(call, self.rank, self.size)
        if self._lost is not None:
            raise self._lost
        match call:
            case calls.Send() | calls.Recv() if call.peer // self._num_columns == self._row:
                return _RowMessage(self, type(call)(call.tensor, call.peer % self._num_columns, call.tag))
            case calls.Send() | calls.Recv() | calls.NeighbourAllReduce():
                return self._whole.start(call)
            case _:
                work = _StagedWork(self, self._plan(call))
                self._under_way.append(work)
                self.advance()
                return work

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        """Over `whole` alone: a part need not lie evenly on the hosts."""
        return self._whole.split(colour, key)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inside.empty(shape, dtype)

    def close(self) -> None:
        self._under_way.clear()
        for group in (*reversed(self._stages), self._whole):
            group.close()

    def advance(self) -> None:
        """Start every stage that may start: a work never overtakes an earlier one."""
        limit = SECOND_ROW
        for work in tuple(self._under_way):
            limit = work.advance(limit)
        self._under_way = [work for work in self._under_way if not work.is_over]

    def wait_for(self, work: "_StagedWork") -> None:
        self.advance()
        while not work.is_over:
            self._under_way[0].finish_stage()
            self.advance()

    def start_stage(self, stage: int, call: Call) -> AbstractWork:
        return self._stages[stage].start(call)

    def give_up(self, stage: int, error: PeerLostError) -> PeerLostError:
        """Fail all that is under way, and return the error to raise.

        It names the lost peer by its rank in the whole, the same on all ranks: those of other hosts notice that we
        leave the groups in which they wait for us, and then all ask the whole who is missing.
        """
        if self._lost is not None:
            return self._lost
        for group in self._stages:
            group.close()
        try:
            self._whole.barrier()
            row, column = (error.peer, self._column) if stage == COLUMN else (self._row, error.peer)
            self._lost = PeerLostError(str(error), row * self._num_columns + column)
        except PeerLostError as lost:
            self._lost = lost
        for work in self._under_way:
            work.fail(self._lost)
        return self._lost

    def _plan(self, call: Call) -> Stages:
        plans: dict[type, Callable[[Any], Stages]] = {
            calls.AllReduce: self._all_reduce,
            calls.ReduceScatter: self._reduce_scatter,
            calls.AllGather: self._all_gather,
            calls.AllToAll: self._all_to_all,
            calls.Broadcast: self._broadcast,
            calls.Reduce: self._reduce,
            calls.Gather: self._gather,
            calls.Scatter: self._scatter,
            calls.Barrier: self._barrier,
        }
        return plans[type(call)](call)

    def _all_reduce(self, call: calls.AllReduce) -> Stages:
        dense, size = make_dense(call.tensor), call.tensor.numel()
        length = -(-size // self._num_columns)
        padded = dense if length * self._num_columns == size else _pad(dense, length * self._num_columns)
        part = dense.new_empty(length)
        op = "sum" if call.op == "mean" else call.op
        yield FIRST_ROW, calls.ReduceScatter(part, padded, op)
        yield COLUMN, calls.AllReduce(part, op)
        if call.op == "mean":
            part.div_(self.size)
        yield SECOND_ROW, calls.AllGather(padded, part)
        copy_back(call.tensor, padded[:size])

    def _reduce_scatter(self, call: calls.ReduceScatter) -> Stages:
        op = "sum" if call.op == "mean" else call.op
        by_column = _swap(make_dense(call.tensor), self._num_rows, self._num_columns)
        parts = by_column.new_empty(by_column.numel() // self._num_columns)
        output = by_column.new_empty(call.output.numel())
        yield FIRST_ROW, calls.ReduceScatter(parts, by_column, op)
        yield COLUMN, calls.ReduceScatter(output, parts, op)
        if call.op == "mean":
            output.div_(self.size)
        copy_back(call.output, output)

    def _all_gather(self, call: calls.AllGather) -> Stages:
        dense = make_dense(call.tensor)
        of_column = dense.new_empty(dense.numel() * self._num_rows)
        by_column = dense.new_empty(dense.numel() * self.size)
        yield COLUMN, calls.AllGather(of_column, dense)
        yield SECOND_ROW, calls.AllGather(by_column, of_column)
        copy_back(call.output, _swap(by_column, self._num_columns, self._num_rows))

    def _all_to_all(self, call: calls.AllToAll) -> Stages:
        by_column = _swap(make_dense(call.tensor), self._num_rows, self._num_columns)
        from_row, output = torch.empty_like(by_column), torch.empty_like(by_column)
        yield FIRST_ROW, calls.AllToAll(from_row, by_column)
        yield COLUMN, calls.AllToAll(output, _swap(from_row, self._num_columns, self._num_rows))
        copy_back(call.output, output)

    def _broadcast(self, call: calls.Broadcast) -> Stages:
        row, column = divmod(call.root, self._num_columns)
        if self._column == column:
            yield COLUMN, calls.Broadcast(call.tensor, row)
        yield SECOND_ROW, calls.Broadcast(call.tensor, column)

    def _reduce(self, call: calls.Reduce) -> Stages:
        row, column = divmod(call.root, self._num_columns)
        total, op = make_dense(call.tensor).clone(), "sum" if call.op == "mean" else call.op
        yield FIRST_ROW, calls.Reduce(total, column, op)
        if self._column == column:
            yield COLUMN, calls.Reduce(total, row, op)
        if self.rank == call.root:
            copy_back(call.tensor, total.div_(self.size) if call.op == "mean" else total)

    def _gather(self, call: calls.Gather) -> Stages:
        row, column = divmod(call.root, self._num_columns)
        dense = make_dense(call.tensor)
        of_row = dense.new_empty(dense.numel() * self._num_columns) if self._column == column else None
        yield FIRST_ROW, calls.Gather(dense, of_row, column)
        if of_row is not None:
            output = None if self.rank != call.root or call.output is None else make_dense(call.output)
            yield COLUMN, calls.Gather(of_row, output, row)
            if output is not None and call.output is not None:
                copy_back(call.output, output)

    def _scatter(self, call: calls.Scatter) -> Stages:
        row, column = divmod(call.root, self._num_columns)
        output = make_dense(call.output)
        of_row = output.new_empty(output.numel() * self._num_columns) if self._column == column else None
        if of_row is not None:
            whole = None if self.rank != call.root or call.tensor is None else make_dense(call.tensor)
            yield COLUMN, calls.Scatter(of_row, whole, row)
        yield SECOND_ROW, calls.Scatter(output, of_row, column)
        copy_back(call.output, output)

    def _barrier(self, call: calls.Barrier) -> Stages:
        yield FIRST_ROW, call
        yield COLUMN, call


def _check_order(inside: AbstractGroup, whole: AbstractGroup) -> None:
    ranks = torch.empty(inside.size, dtype=torch.int64)
    inside.all_gather(ranks, torch.tensor([whole.rank]))
    first = whole.rank - inside.rank
    if ranks.tolist() != list(range(first, first + inside.size)) or first % inside.size or whole.size % inside.size:
        raise UsageError(
            f"ranks do not count host by host (ranks on this host: {ranks.tolist()}, of {whole.size}); "
            "start the same number on each host, in order"
        )


def _swap(parts: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Parts that lie row by row, column by column instead."""
    return parts.view(num_rows, num_columns, -1).transpose(0, 1).contiguous().view(-1)


def _pad(dense: Tensor, length: int) -> Tensor:
    padded = dense.new_zeros(length)
    padded[: dense.numel()] = dense
    return padded


@final
class _RowMessage(AbstractWork):
    """A message inside a host."""

    def __init__(self, group: HierarchicalGroup, call: calls.Send | calls.Recv) -> None:
        self._group = group
        try:
            self._inner = group.start_stage(FIRST_ROW, call)
        except PeerLostError as error:
            raise group.give_up(FIRST_ROW, error) from None

    def wait(self) -> None:
        try:
            self._inner.wait()
        except PeerLostError as error:
            raise self._group.give_up(FIRST_ROW, error) from None

    def is_done(self) -> bool:
        return self._inner.is_done()


@final
class _StagedWork(AbstractWork):
    """A call on its way through its stages: one under way, or one that it wants next, until it is over."""

    def __init__(self, group: HierarchicalGroup, stages: Stages) -> None:
        self._group, self._stages = group, stages
        self._stage = -1
        self._current: AbstractWork | None = None
        self._wanted: tuple[int, Call] | None = next(stages)
        self._error: PeerLostError | None = None

    @property
    def is_over(self) -> bool:
        return self._current is None and self._wanted is None

    def advance(self, limit: int) -> int:
        """Go on as far as stage `limit` without waiting; returns how far the next work may go."""
        while not self.is_over:
            if self._current is not None:
                if not self._current.is_done():
                    break
                self.finish_stage()
            elif self._wanted is not None:
                if self._wanted[0] > limit:
                    break
                self._try(self._begin)
        return limit if self.is_over else min(limit, self._stage)

    def finish_stage(self) -> None:
        """Wait for the stage under way, and find the next."""
        if self._current is not None:
            self._try(self._current.wait)
        if self._error is None:
            self._current, self._wanted = None, next(self._stages, None)

    def fail(self, error: PeerLostError) -> None:
        self._current = self._wanted = None
        self._error = error

    def wait(self) -> None:
        self._group.wait_for(self)
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        self._group.advance()
        return self.is_over

    def _begin(self) -> None:
        assert self._wanted is not None
        (self._stage, call), self._wanted = self._wanted, None
        self._current = self._group.start_stage(self._stage, call)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except PeerLostError as error:
            self._group.give_up(self._stage, error)
