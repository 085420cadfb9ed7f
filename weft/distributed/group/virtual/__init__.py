"""The virtual cluster: N ranks in one process, deterministic, in virtual time."""

from weft.distributed.group.virtual.cluster import TEN_GIGABIT, VirtualResult, die, run_virtual
from weft.distributed.group.virtual.group import VirtualClock, VirtualGroup
from weft.distributed.group.virtual.post import AbstractGuest, AbstractWait, PostOffice
from weft.distributed.group.virtual.trace import Span, chrome_events, write_chrome_trace

__all__ = [
    "TEN_GIGABIT",
    "AbstractGuest",
    "AbstractWait",
    "PostOffice",
    "Span",
    "VirtualClock",
    "VirtualGroup",
    "VirtualResult",
    "chrome_events",
    "die",
    "run_virtual",
    "write_chrome_trace",
]
