"""Calls that go on while their ranks do something else, messages by tag, and what a work knows about its time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.distributed.group.calls import AllReduce, Barrier, Recv, Send
from weft.distributed.group.shared_memory import SharedMemoryGroup

Run = Callable[..., list[Any]]


def test_calls_started_together_end_in_any_order_of_waiting(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        tensors = [torch.full((length,), float(length)) for length in (1, 400_000, 5, 30_000)]
        works = [group.start(AllReduce(tensor)) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            work.wait()
        return [float(tensor[-1]) for tensor in tensors]

    assert run_ranks(program, 3, compiled=compiled) == [[3.0, 1_200_000.0, 15.0, 90_000.0]] * 3


def test_a_started_call_goes_on_without_its_caller(run_ranks: Run, tmp_path: Path) -> None:
    """Rank 0 does not wait until rank 1, which needs it, has its result."""
    done = tmp_path / "done"

    def program(group: SharedMemoryGroup) -> float:
        tensor = torch.ones(500_000)
        work = group.start(AllReduce(tensor))
        if group.rank == 0:
            end = time.monotonic() + 20
            while not done.exists() and time.monotonic() < end:
                pass
            assert done.exists()
        work.wait()
        done.touch()
        return float(tensor[0])

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_work_that_is_dropped_still_ends(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> float:
        tensor = torch.ones(50_000)
        for _ in range(200):
            group.start(AllReduce(tensor, "mean"))
        group.barrier()
        return float(tensor[0])

    assert run_ranks(program, 2, compiled=compiled) == [1.0, 1.0]


def test_is_done_turns_true_without_wait(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        view = torch.ones(3, 2)[:, 0]
        work = group.start(AllReduce(view))
        while not work.is_done():
            pass
        return [float(value) for value in view]

    assert run_ranks(program, 2, compiled=compiled) == [[2.0] * 3] * 2


def test_a_work_tells_when_it_ran(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> bool:
        before = time.monotonic_ns()
        work = group.start(Barrier())
        work.wait()
        timing, after = work.timing, time.monotonic_ns()
        return before <= timing.queued <= timing.begun <= timing.ended <= after and 0 <= timing.waited <= after - before

    assert run_ranks(program, 2, compiled=compiled) == [True, True]


def test_both_may_send_before_they_receive(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent, received = torch.full((900_000,), float(group.rank)), torch.empty(900_000)
        works = [group.start(Send(sent, right)), group.start(Recv(received, left))]
        for work in works:
            work.wait()
        return [float(received[0]), float(received[-1])]

    assert run_ranks(program, 3, compiled=compiled) == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_messages_are_matched_by_tag_and_keep_their_order(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        messages = [(7, 1.0), (8, 2.0), (7, 3.0), (9, 4.0)]
        if group.rank == 0:
            works = [group.start(Send(torch.full((length,), value), 1, tag)) for tag, value in messages
                     for length in (3, 100_000)]  # fmt: skip
            for work in works:
                work.wait()
            return []
        small, large = torch.empty(3), torch.empty(100_000)
        got = []
        for tag in (9, 7, 7, 8):
            group.recv(small, 0, tag)
            group.recv(large, 0, tag)
            got += [float(small[-1]), float(large[-1])]
        return got

    assert run_ranks(program, 2, compiled=compiled)[1] == [4.0, 4.0, 1.0, 1.0, 3.0, 3.0, 2.0, 2.0]


def test_a_rank_may_write_to_itself(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> float:
        received = torch.zeros(200_000)
        work = group.start(Recv(received, group.rank))
        group.send(torch.ones(200_000), group.rank)
        work.wait()
        return float(received.sum())

    assert run_ranks(program, 2, compiled=compiled) == [200_000.0] * 2


def test_messages_pass_collectives_that_wait(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> float:
        tensor = torch.ones(1)
        if group.rank == 0:
            work = group.start(AllReduce(tensor))
            group.send(torch.tensor([5.0]), 1)
            work.wait()
            return float(tensor)
        received = torch.zeros(1)
        group.recv(received, 0)
        group.all_reduce(tensor)
        return float(tensor)

    assert run_ranks(program, 2, compiled=compiled) == [2.0, 2.0]


def test_messages_of_many_lengths_in_a_row_keep_apart(run_ranks: Run, compiled: bool) -> None:
    """More of them than a channel holds: what is freed for the next message says nothing of the last one any more."""
    lengths = [1 + 97 * number % 64 for number in range(200)]

    def program(group: SharedMemoryGroup) -> int:
        wrong = 0
        for _ in range(40 if compiled else 2):
            if group.rank == 0:
                works = [group.start(Send(torch.full((length,), float(length)), 1)) for length in lengths]
            else:
                arrivals = [torch.zeros(length) for length in lengths]
                works = [group.start(Recv(arrival, 0)) for arrival in arrivals]
            for work in works:
                work.wait()
            if group.rank == 1:
                wrong += sum(bool((arrival != len(arrival)).any()) for arrival in arrivals)
        return wrong

    assert run_ranks(program, 2, compiled=compiled) == [0, 0]
