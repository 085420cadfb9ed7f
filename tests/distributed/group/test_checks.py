"""Calls that cannot be: each is refused with its reason."""

import pytest
import torch

from weft.distributed.group import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    NeighbourAllReduce,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
    check_call,
)
from weft.errors import UsageError

TWO, FOUR, SIX = torch.zeros(2), torch.zeros(4), torch.zeros(6)
WHOLE = torch.zeros(2, dtype=torch.int64)
RING = ((2,), (0,), (1,))

WRONG: list[tuple[Call, str]] = [
    (Send(TWO, 3), "not in the group"),
    (Recv(TWO, -1), "not in the group"),
    (Send(TWO, 1), "this rank itself"),
    (Recv(TWO, 0, tag=-2), "tag is negative"),
    (AllReduce(WHOLE, "mean"), "floating-point"),
    (Reduce(WHOLE, 0, "mean"), "floating-point"),
    (Reduce(TWO, 3), "root"),
    (Broadcast(TWO, -1), "root"),
    (ReduceScatter(TWO, FOUR), "3 parts"),
    (ReduceScatter(WHOLE, SIX.long(), "mean"), "floating-point"),
    (AllGather(SIX, FOUR), "3 parts"),
    (AllGather(SIX, WHOLE), "3 parts"),
    (AllToAll(FOUR, SIX), "1 parts"),
    (AllToAll(FOUR, FOUR), "does not divide"),
    (AllGather(SIX, TWO, (4, 2)), "one for each rank"),
    (AllGather(SIX, TWO, (5, 2, -1)), "negative"),
    (AllGather(SIX, TWO, (3, 2, 2)), "do not add up"),
    (AllGather(torch.zeros(()), TWO, (0, 0, 0)), "do not add up"),
    (AllGather(SIX, TWO, (2, 3, 1)), "does not have its size"),
    (AllGather(SIX, WHOLE, (1, 2, 3)), "does not have its size"),
    (AllGather(torch.zeros(6, 1), TWO, (1, 2, 3)), "does not have its size"),
    (ReduceScatter(TWO, FOUR, "sum", (1, 2, 3)), "do not add up"),
    (ReduceScatter(FOUR, SIX, "sum", (1, 2, 3)), "does not have its size"),
    (ReduceScatter(WHOLE, SIX.long(), "mean", (1, 2, 3)), "floating-point"),
    (AllToAll(FOUR, SIX, (1, 2, 3)), "give both"),
    (AllToAll(FOUR, SIX, recv_sizes=(1, 2, 1)), "give both"),
    (AllToAll(FOUR, SIX, (1, 2, 3), (1, 2, 2)), "do not add up"),
    (AllToAll(FOUR, SIX, (1, 2, 3), (2, 1, 1)), "cannot be received"),
    (AllToAll(FOUR.long(), SIX, (1, 2, 3), (1, 2, 1)), "cannot be received"),
    (AllToAll(torch.zeros(4, 1), SIX, (1, 2, 3), (1, 2, 1)), "cannot be received"),
    (NeighbourAllReduce(TWO, ((),), ((1.0,),)), "does not fit the group"),
    (NeighbourAllReduce(TWO, ((0,), (), ()), ((1.0,),) * 3), "not other ranks"),
    (NeighbourAllReduce(TWO, ((), (0, 0), ()), ((1.0,),) * 3), "not other ranks"),
    (NeighbourAllReduce(TWO, RING, ((1.0,),) * 3), "weights do not fit"),
    (NeighbourAllReduce(WHOLE, RING, ((1.0, 1.0),) * 3), "floating-point"),
]

RIGHT: list[Call] = [
    Send(TWO, 0),
    AllReduce(WHOLE, "max"),
    ReduceScatter(TWO, SIX),
    AllGather(SIX, TWO),
    AllToAll(SIX, SIX.clone()),
    ReduceScatter(TWO, SIX, "sum", (4, 2, 0)),
    AllGather(torch.zeros(6, 5), torch.zeros(2, 5), (0, 2, 4)),
    AllToAll(FOUR, SIX, (1, 2, 3), (2, 2, 0)),
    NeighbourAllReduce(TWO, RING, ((0.5, 0.5),) * 3),
    Barrier(),
]


@pytest.mark.parametrize(("call", "reason"), WRONG)
def test_wrong_calls_are_refused(call: Call, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        check_call(call, rank=1, size=3)


@pytest.mark.parametrize("call", RIGHT)
def test_right_calls_pass(call: Call) -> None:
    check_call(call, rank=1, size=3)
