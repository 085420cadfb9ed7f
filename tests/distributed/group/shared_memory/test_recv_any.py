"""Receiving from whichever rank sends first."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.distributed.group.calls import Recv, Send
from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.errors import PeerLostError

Run = Callable[..., list[Any]]
LONG = 300_000  # elements: streams through several packets


def receive(group: SharedMemoryGroup, length: int, tag: int = 0) -> tuple[int, float]:
    """Who sent, and the last number of the message."""
    tensor = torch.empty(length)
    work = group.start_recv_any(tensor, tag)
    work.wait()
    return work.source, float(tensor[-1])


def test_each_message_reaches_one_receive_with_the_name_of_its_sender(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[Any]:
        if group.rank != 0:
            for length in (3, LONG):
                group.send(torch.full((length,), float(group.rank)), 0, tag=length)
            return []
        return [sorted(receive(group, length, tag=length) for _ in range(2)) for length in (LONG, 3)]

    assert run_ranks(program, 3, compiled=compiled)[0] == [[[1, 1.0], [2, 2.0]]] * 2


def test_it_takes_its_turn_among_receives_from_one_rank(run_ranks: Run, compiled: bool) -> None:
    """Messages of one rank with one tag fill receives in the order of their start, whomever these are for."""

    def program(group: SharedMemoryGroup) -> list[Any]:
        if group.rank == 1:
            for number in range(4):
                group.send(torch.tensor([float(number)]), 0)
            return []
        tensors = [torch.empty(1) for _ in range(4)]
        works = [
            group.start_recv_any(tensor) if number % 2 else group.start(Recv(tensor, 1))
            for number, tensor in enumerate(tensors)
        ]
        for work in reversed(works):
            work.wait()
        return [[work.source, float(tensor)] for work, tensor in zip(works, tensors, strict=True)]

    assert run_ranks(program, 2, compiled=compiled)[0] == [[1, 0.0], [1, 1.0], [1, 2.0], [1, 3.0]]


def test_a_message_to_oneself_counts(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> Any:
        sent = group.start(Send(torch.tensor([5.0]), 0))
        found = receive(group, 1)
        sent.wait()
        return found

    assert run_ranks(program, 1, compiled=compiled) == [[0, 5.0]]


def test_ranks_that_left_are_not_waited_for_as_long_as_one_is_there(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> Any:
        group.barrier()
        if group.rank == 1:
            return None
        if group.rank == 2:
            group.recv(torch.empty(1), 0)
            group.send(torch.ones(1), 0)
            return None
        first = group.start_recv_any(torch.empty(1))
        group.send(torch.ones(1), 2)
        first.wait()
        with pytest.raises(PeerLostError, match="rank 2 closed the group while rank 0 waited"):
            receive(group, 1)
        return first.source

    assert run_ranks(program, 3, compiled=compiled)[0] == 2


def test_a_rank_that_died_is_named(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> str:
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 2:
            try:
                group.recv(torch.empty(1), 0)
            except PeerLostError:
                return ""
        try:
            receive(group, 1)
        except PeerLostError as error:
            return str(error)
        return "received"

    assert run_ranks(program, 3, compiled=compiled)[0] == "rank 1 died (seen by rank 0); look at its output"
