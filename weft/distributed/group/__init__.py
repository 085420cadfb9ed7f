"""Ranks that exchange tensors: one interface, many transports.

The kinds with a transport are imported where they are used; the virtual group, whose collectives are algorithms of our
own, is in `weft.distributed.virtual`.
"""

from weft.distributed.group.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    NeighbourAllReduce,
    NeighbourGraph,
    Recv,
    Reduce,
    ReduceOp,
    ReduceScatter,
    Send,
    Sizes,
)
from weft.distributed.group.checks import check_call
from weft.distributed.group.clock import AbstractClock, RealClock
from weft.distributed.group.faulty import (
    Delay,
    Drop,
    Fault,
    FaultyGroup,
    Kill,
    SlowLink,
    SlowRank,
    kill_this_process,
)
from weft.distributed.group.group import AbstractGroup, AbstractWork, DoneWork
from weft.distributed.group.recording import GroupTraffic, RecordingGroup, handed_bytes, message_bytes, wire_bytes
from weft.distributed.group.solo import SoloGroup
from weft.distributed.group.uneven import exchange_lengths, gather_lengths, gather_parts

__all__ = [
    "AbstractClock",
    "AbstractGroup",
    "AbstractWork",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Call",
    "Delay",
    "DoneWork",
    "Drop",
    "Fault",
    "FaultyGroup",
    "GroupTraffic",
    "Kill",
    "NeighbourAllReduce",
    "NeighbourGraph",
    "RealClock",
    "RecordingGroup",
    "Recv",
    "Reduce",
    "ReduceOp",
    "ReduceScatter",
    "Send",
    "Sizes",
    "SlowLink",
    "SlowRank",
    "SoloGroup",
    "check_call",
    "exchange_lengths",
    "gather_lengths",
    "gather_parts",
    "handed_bytes",
    "kill_this_process",
    "message_bytes",
    "wire_bytes",
]
