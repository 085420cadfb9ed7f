"""The virtual cluster: N ranks in one process, deterministic, in virtual time."""

from weft.distributed.virtual.cluster import VirtualResult, die, run_virtual
from weft.distributed.virtual.group import VirtualClock, VirtualGroup
from weft.distributed.virtual.network import AbstractTransport, AbstractWait, VirtualNetwork
from weft.distributed.virtual.process_state import AbstractProcessState, RandomState
from weft.distributed.virtual.trace import TraceEvent, chrome_events, write_chrome_trace
from weft.planning.network import TEN_GIGABIT

__all__ = [
    "TEN_GIGABIT",
    "AbstractProcessState",
    "AbstractTransport",
    "AbstractWait",
    "RandomState",
    "TraceEvent",
    "VirtualClock",
    "VirtualGroup",
    "VirtualNetwork",
    "VirtualResult",
    "chrome_events",
    "die",
    "run_virtual",
    "write_chrome_trace",
]
