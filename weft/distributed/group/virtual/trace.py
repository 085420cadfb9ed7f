"""What happened when, in virtual time: spans per rank, and their form for chrome://tracing and Perfetto."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft import atomic

__all__ = ["Span", "chrome_events", "write_chrome_trace"]


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds `start` to `end` of a rank's own time (computing, waiting) or of its network side (calls under way)."""

    rank: int
    start: float
    end: float
    what: str
    lane: Literal["rank", "network"] = "rank"


def chrome_events(trace: Sequence[Span]) -> list[dict[str, Any]]:
    """Complete events in microseconds; a rank is a process with two threads, so that overlap shows as two bars."""
    return [
        {
            "ph": "X",
            "name": span.what,
            "pid": span.rank,
            "tid": span.lane,
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }
        for span in trace
    ]


def write_chrome_trace(path: Path, trace: Sequence[Span]) -> None:
    atomic.write_json(path, {"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"})
