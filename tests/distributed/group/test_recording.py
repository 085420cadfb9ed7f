"""The recording group: counts of calls and bytes, and nothing else changed."""

from collections.abc import Callable

import pytest
import torch

from weft.distributed.collectives import MessageGroup
from weft.distributed.group import (
    AbstractGroup,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    GroupTraffic,
    NeighbourAllReduce,
    RecordingGroup,
    Recv,
    ReduceScatter,
    Send,
    SoloGroup,
    handed_bytes,
    message_bytes,
    wire_bytes,
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


def test_messages_of_unequal_parts_carry_those_parts_alone() -> None:
    """The ring sends every part but the next rank's own; an empty one is not sent."""

    def program(group: AbstractGroup) -> dict[int, int]:
        recording = RecordingGroup(group)
        sizes = (5, 0, 2)
        MessageGroup(recording).all_gather(torch.zeros(7), torch.zeros(sizes[group.rank]), sizes)
        return recording.traffic.sent_to

    assert run_virtual(program, 3).results == ({1: 28}, {2: 20}, {0: 8})


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
        (AllGather(torch.zeros(8), torch.zeros(3), (5, 3)), 12),
        (ReduceScatter(torch.zeros(3), torch.zeros(8), "sum", (5, 3)), 32),
        (AllToAll(torch.zeros(9), torch.zeros(4, dtype=torch.float64), (1, 3), (6, 3)), 32),
    ],
)
def test_bytes_are_those_of_the_message(call: Call, size: int) -> None:
    assert message_bytes(call) == size


RING = ((3,), (0,), (1,), (2,))
CALLS: dict[str, Callable[[int], Call]] = {
    "all-reduce": lambda rank: AllReduce(torch.zeros(64)),
    "all-gather": lambda rank: AllGather(torch.zeros(4, 16), torch.zeros(1, 16)),
    "reduce-scatter": lambda rank: ReduceScatter(torch.zeros(16), torch.zeros(64)),
    "all-to-all": lambda rank: AllToAll(torch.zeros(64), torch.zeros(64)),
    "uneven all-to-all": lambda rank: AllToAll(
        torch.zeros(4 * (rank + 1)), torch.zeros(10), (1, 2, 3, 4), (rank + 1,) * 4
    ),
    "neighbours": lambda rank: NeighbourAllReduce(torch.zeros(8), RING, ((0.5, 0.5),) * 4),
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_bytes_on_the_wire_are_those_that_the_virtual_network_counts(make: Callable[[int], Call]) -> None:
    def program(group: AbstractGroup) -> int:
        call = make(group.rank)
        group.run(call)
        return wire_bytes(call, group.rank, group.size)

    result = run_virtual(program, 4)
    assert result.results == result.bytes_sent and sum(result.results) > 0


def test_a_message_is_handed_over_once_and_received_ones_are_not() -> None:
    tensor = torch.zeros(5)
    assert [handed_bytes(Send(tensor, 1)), handed_bytes(Recv(tensor, 1))] == [20, 0]
    assert [wire_bytes(Send(tensor, 1), 0, 2), wire_bytes(Recv(tensor, 1), 0, 2)] == [20, 0]
    assert [wire_bytes(Broadcast(tensor, root=1), rank, 3) for rank in range(3)] == [0, 20, 0]
    assert [wire_bytes(Barrier(), 0, 3), handed_bytes(AllGather(torch.zeros(10), tensor))] == [0, 20]
