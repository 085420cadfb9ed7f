"""Reductions under way: one call or several at once, messages that are sent before anybody asks for them, no call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.distributed.codecs import Reduction, ReductionWork
from weft.distributed.group import AbstractGroup, SoloGroup
from weft.distributed.group.calls import AllReduce, Call, Recv, Send
from weft.distributed.virtual import run_virtual


def swap(rank: int) -> Reduction:
    """A length, and then so many numbers, both sent before the other side knows how many; then a collective."""
    own, peer = torch.full((3 + rank,), float(rank)), 1 - rank
    length = torch.empty(1, dtype=torch.int64)
    yield Send(torch.tensor([len(own)]), peer), Send(own, peer, tag=1), Recv(length, peer)
    numbers = torch.empty(int(length))
    yield Recv(numbers, peer, tag=1)
    total = torch.tensor([numbers.sum()])
    yield AllReduce(total)
    return torch.cat([total, numbers])


def test_messages_are_sent_before_their_receive_is_known() -> None:
    def program(group: AbstractGroup) -> Tensor:
        work = ReductionWork(group, swap(group.rank))
        group.clock.charge(1.0)
        assert work.is_done()
        return work.wait()

    first, second = run_virtual(program, 2).results
    assert first.tolist() == [4.0, 1.0, 1.0, 1.0, 1.0]
    assert second.tolist() == [4.0, 0.0, 0.0, 0.0]


def test_a_reduction_is_over_when_its_last_message_has_left() -> None:
    def send_or_receive(rank: int) -> Reduction:
        numbers = torch.ones(1_000_000)
        yield (Send(numbers, 1),) if rank == 0 else (Recv(numbers, 0),)
        return numbers

    result = run_virtual(lambda group: ReductionWork(group, send_or_receive(group.rank)).wait().sum().item(), 2)
    assert result.results == (1e6, 1e6)
    assert result.seconds[0] >= 4e6 * 8e-10  # of ten gigabits a second


def test_a_reduction_may_need_no_call() -> None:
    def alone(calls: Sequence[Call]) -> Reduction:
        yield from calls
        return torch.ones(2)

    work = ReductionWork(SoloGroup(), alone([]))
    assert work.is_done() and work.wait().tolist() == [1.0, 1.0]
