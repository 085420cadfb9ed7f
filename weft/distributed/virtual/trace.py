"""The trace of a run in virtual time: events of each rank, and their form for chrome://tracing and Perfetto."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft import atomic

__all__ = ["TraceEvent", "chrome_events", "write_chrome_trace"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Seconds `start` to `end` of a rank's own time (computing, waiting) or of its network side (calls under way)."""

    rank: int
    start: float
    end: float
    what: str
    lane: Literal["rank", "network"] = "rank"


def chrome_events(trace: Sequence[TraceEvent]) -> list[dict[str, Any]]:
    """Chrome's complete events, in microseconds; a rank is a process with two threads, so overlap shows as two bars."""
    return [
        {
            "ph": "X",
            "name": event.what,
            "pid": event.rank,
            "tid": event.lane,
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
        }
        for event in trace
    ]


def write_chrome_trace(path: Path, trace: Sequence[TraceEvent]) -> None:
    atomic.write_json(path, {"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"})
