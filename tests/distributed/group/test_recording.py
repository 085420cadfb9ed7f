"""The recording group: counts of calls and bytes, and nothing else changed."""

from collections.abc import Callable

import pytest
import torch

from weft.distributed.group import (
    AbstractGroup,
    AllGather,
    Barrier,
    Broadcast,
    Call,
    GroupTraffic,
    RecordingGroup,
    SoloGroup,
    message_bytes,
)
from weft.distributed.virtual import run_virtual
from weft.errors import UsageError


def traffic(program: Callable[[AbstractGroup], None], size: int) -> tuple[GroupTraffic, ...]:
    def recorded(group: AbstractGroup) -> GroupTraffic:
        recording = RecordingGroup(group)
        program(recording)
        return recording.traffic

    return run_virtual(recorded, size).results


def test_calls_and_bytes_per_kind_and_peer() -> None:
    def program(group: AbstractGroup) -> None:
        group.all_reduce(torch.zeros(10))
        group.all_reduce(torch.zeros(5, dtype=torch.bfloat16))
        group.barrier()
        if group.rank == 0:
            group.send(torch.zeros(3, dtype=torch.int64), 2)
            group.send(torch.zeros(1), 1)
        else:
            group.recv(torch.zeros(3, dtype=torch.int64) if group.rank == 2 else torch.zeros(1), 0)

    first, _, last = traffic(program, 3)
    assert first.num_calls == {"AllReduce": 2, "Barrier": 1, "Send": 2}
    assert first.num_bytes == {"AllReduce": 50, "Barrier": 0, "Send": 28}
    assert first.sent_to == {2: 24, 1: 4} and first.bytes_sent == 28
    assert last.received_from == {0: 24} and last.sent_to == {}


def test_traffic_is_a_value_that_later_calls_do_not_change() -> None:
    group = RecordingGroup(SoloGroup())
    before = group.traffic
    group.barrier()
    assert before == GroupTraffic() and group.traffic.num_calls == {"Barrier": 1}


def test_a_refused_call_is_not_counted() -> None:
    group = RecordingGroup(SoloGroup())
    with pytest.raises(UsageError):
        group.broadcast(torch.zeros(1), root=4)
    assert group.traffic == GroupTraffic()


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (Barrier(), 0),
        (Broadcast(torch.zeros(3)), 12),
        (AllGather(torch.zeros(8), torch.zeros(2)), 8),
    ],
)
def test_bytes_are_those_of_the_message(call: Call, size: int) -> None:
    assert message_bytes(call) == size
