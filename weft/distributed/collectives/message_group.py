"""A group whose collectives are our algorithms over another group's Send and Recv."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.collectives.algorithms import all_reduce_rounds, rounds_of
from weft.distributed.collectives.choice import AlgorithmChoice
from weft.distributed.collectives.execution import CollectiveRounds
from weft.distributed.group.calls import AllReduce, Call, Recv, Send
from weft.distributed.group.checks import check_call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.errors import UsageError

__all__ = ["MessageGroup", "start_rounds"]

# Tags of collectives lie above those of the user's messages and below 2^15, the least that every MPI offers. Ranks
# start collectives in the same order, so they agree on the tag; messages with one tag keep their order, so it may
# come again.
FIRST_COLLECTIVE_TAG = 1 << 14
NUM_COLLECTIVE_TAGS = 1 << 14
POLL_SECONDS = 2e-5


def start_rounds(call: Call, rank: int, size: int, tag: int, choice: AlgorithmChoice) -> CollectiveRounds | None:
    """The rounds of a collective call, all-reduce by the chosen algorithm; None where that is the transport's own.

    Args:
        rank: of the caller, among `size`.
        tag: of the messages, the same on all ranks.
        choice: the algorithm of an all-reduce.
    """
    if isinstance(call, AllReduce):
        algorithm = choice.algorithm(size, call.tensor.nbytes, call.tensor.element_size())
        return None if algorithm is None else all_reduce_rounds(call, rank, size, tag, algorithm)
    return rounds_of(call, rank, size, tag)


def _ranks_in(part: AbstractGroup, rank: int) -> tuple[int, ...]:
    """The ranks that the members of a part had before it was split off, in its order."""
    ranks = torch.empty(part.size, dtype=torch.int64)
    part.all_gather(ranks, torch.tensor([rank]))
    return tuple(ranks.tolist())


@final
class MessageGroup(AbstractGroup):
    """Answers collectives by rounds of messages over `transport`, which needs no more than Send and Recv.

    A collective advances while its rank waits for any work of this group, or asks whether one is done.
    """

    def __init__(self, transport: AbstractGroup, choice: AlgorithmChoice | None = None) -> None:
        super().__init__(transport.rank, transport.size, clock=transport.clock, generation=transport.generation)
        self._transport = transport
        self._choice = choice or AlgorithmChoice()
        self._num_started = 0
        self._under_way: list[_CollectiveWork] = []

    def start(self, call: Call) -> AbstractWork:
        check_call(call, self.rank, self.size)
        if isinstance(call, Send | Recv):
            if call.tag >= FIRST_COLLECTIVE_TAG:
                raise UsageError(f"tag is kept for collectives (tag: {call.tag}); use one below {FIRST_COLLECTIVE_TAG}")
            return _TransportWork(self, self._transport.start(call))
        if self._choice.name == "native":
            return self._transport.start(call)
        tag = FIRST_COLLECTIVE_TAG + self._num_started % NUM_COLLECTIVE_TAGS
        rounds = start_rounds(call, self.rank, self.size, tag, self._choice)
        if rounds is None:
            return _TransportWork(self, self._transport.start(call))
        self._num_started += 1
        work = _CollectiveWork(self, rounds)
        self._under_way.append(work)
        work.advance()
        return work

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        part, chosen = self._transport.split(colour, key), self._choice
        if chosen.name == "auto":
            chosen = chosen.for_part(_ranks_in(part, self.rank))
        return MessageGroup(part, chosen)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._transport.empty(shape, dtype)

    def close(self) -> None:
        for work in tuple(self._under_way):
            work.abandon()
        self._transport.close()

    def start_all(self, round_calls: Sequence[Send | Recv]) -> list[AbstractWork]:
        return [self._transport.start(call) for call in round_calls]

    def retire(self, work: "_CollectiveWork") -> None:
        self._under_way.remove(work)

    def advance_others(self) -> bool:
        """Move every collective on as far as it goes without waiting; whether any moved."""
        moved = [work.advance() for work in tuple(self._under_way)]
        return any(moved)

    def wait_for(self, work: AbstractWork, own: "_CollectiveWork | None") -> None:
        """Wait for a message; the peer may first need an answer in another collective, so keep those moving."""
        while not work.is_done():
            if all(other is own for other in self._under_way):
                break
            if not self.advance_others():
                self.clock.wait_until(self.clock.now() + POLL_SECONDS)
        work.wait()


@final
class _TransportWork(AbstractWork):
    """A call that the transport carries out, which must not keep this rank's collectives from moving."""

    def __init__(self, group: MessageGroup, work: AbstractWork) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        self._group.wait_for(self._work, None)

    def is_done(self) -> bool:
        self._group.advance_others()
        return self._work.is_done()


@final
class _CollectiveWork(AbstractWork):
    def __init__(self, group: MessageGroup, rounds: CollectiveRounds) -> None:
        self._group = group
        self._rounds = rounds
        self._pending: list[AbstractWork] = []
        self._is_over = False
        self._error: BaseException | None = None

    def advance(self) -> bool:
        """Go on while the messages of the round are done; whether there was anything to do."""
        moved = False
        try:
            while not self._is_over and all(work.is_done() for work in self._pending):
                moved = True
                for work in self._pending:
                    work.wait()
                self._next_round()
        except Exception as error:
            self._end(error)
        return moved

    def wait(self) -> None:
        while not self._is_over:
            try:
                for work in tuple(self._pending):
                    self._group.wait_for(work, self)
            except Exception as error:
                self._end(error)
            self.advance()
        if self._error is not None:
            raise self._error

    def is_done(self) -> bool:
        self._group.advance_others()
        return self._is_over

    def abandon(self) -> None:
        rank = self._group.rank
        self._end(UsageError(f"the group was closed while a call was under way (rank: {rank}); wait for it before"))

    def _next_round(self) -> None:
        try:
            self._pending = self._group.start_all(next(self._rounds).calls)
        except StopIteration:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over, self._error, self._pending = True, error, []
            self._group.retire(self)
