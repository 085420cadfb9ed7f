"""The control plane of ranks at their own pace: work, stopping, sums, numbers of trainings, journals."""

from weft.distributed.consistency.control.coordinator import (
    STOP,
    SUM,
    TOTAL,
    Coordinator,
    Sums,
    WorkQueue,
    find_missing,
)
from weft.distributed.consistency.control.journal import (
    FLUSH_SECONDS,
    Journal,
    decode,
    encode,
    journal_file,
    read_events,
    read_lines,
)
from weft.distributed.consistency.control.messages import (
    MalformedError,
    Outgoing,
    read_header,
    read_int,
    read_ints,
)

__all__ = [
    "FLUSH_SECONDS",
    "STOP",
    "SUM",
    "TOTAL",
    "Coordinator",
    "Journal",
    "MalformedError",
    "Outgoing",
    "Sums",
    "WorkQueue",
    "decode",
    "encode",
    "find_missing",
    "journal_file",
    "read_events",
    "read_header",
    "read_int",
    "read_ints",
    "read_lines",
]
