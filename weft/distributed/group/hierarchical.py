"""Two transports as one group: a fast one inside each host, another between hosts.

host 0:  0  1       Ranks count host by host, the same number on each. Rank r sits at row r // L, column r % L.
host 1:  2  3       `inside` joins a row; a column is cut out of `whole`, which joins all.
         |  |
      columns       Every column carries its share between hosts, so each byte crosses once for each host.
"""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from weft.distributed.group import calls
from weft.distributed.group.calls import Call
from weft.distributed.group.checks import check_call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.hierarchical_calls import COLUMN, FIRST_ROW, SECOND_ROW, Grid, Stages, stages_of
from weft.errors import PeerLostError, UsageError

__all__ = ["HierarchicalGroup"]


@final
class HierarchicalGroup(AbstractGroup):
    """Built from any two groups: one of the ranks on this host, one of all ranks. It closes both.

    A reduction adds up inside each host, then between hosts; all ranks get the same bits. Messages between hosts, calls
    between neighbours, and all-to-all of unequal parts, whose sizes only their two ranks know, go over `whole`. Calls
    advance while the rank starts, asks or waits for any of them.
    """

    def __init__(self, inside: AbstractGroup, whole: AbstractGroup) -> None:
        super().__init__(whole.rank, whole.size, clock=whole.clock, generation=whole.generation)
        _check_order(inside, whole)
        self._inside, self._whole = inside, whole
        self._grid = Grid(*divmod(whole.rank, inside.size), whole.size // inside.size, inside.size)
        column = whole.split(self._grid.column, self._grid.row)
        self._stages = (inside, column, inside.split(0, inside.rank))
        self._under_way: list[_StagedWork] = []
        self._lost: PeerLostError | None = None

    def start(self, call: Call) -> AbstractWork:
        check_call(call, self.rank, self.size)
        if self._lost is not None:
            raise self._lost
        match call:
            case calls.Send() | calls.Recv() if call.peer // self._grid.num_columns == self._grid.row:
                return _RowMessage(self, type(call)(call.tensor, call.peer % self._grid.num_columns, call.tag))
            case calls.Send() | calls.Recv() | calls.NeighbourAllReduce():
                return self._whole.start(call)
            case calls.AllToAll() if call.send_sizes is not None:
                return self._whole.start(call)
            case _:
                work = _StagedWork(self, stages_of(call, self._grid))
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
            row, column = (error.peer, self._grid.column) if stage == COLUMN else (self._grid.row, error.peer)
            self._lost = PeerLostError(str(error), row * self._grid.num_columns + column)
        except PeerLostError as lost:
            self._lost = lost
        for work in self._under_way:
            work.fail(self._lost)
        return self._lost


def _check_order(inside: AbstractGroup, whole: AbstractGroup) -> None:
    ranks = torch.empty(inside.size, dtype=torch.int64)
    inside.all_gather(ranks, torch.tensor([whole.rank]))
    first = whole.rank - inside.rank
    if ranks.tolist() != list(range(first, first + inside.size)) or first % inside.size or whole.size % inside.size:
        raise UsageError(
            f"ranks do not count host by host (ranks on this host: {ranks.tolist()}, of {whole.size}); "
            "start the same number on each host, in order"
        )


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
