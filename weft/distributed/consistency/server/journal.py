"""The record of a shard's decisions: JSON lines, one file for each seed and shard.

    RUN/decisions/seed-0/shard-0.jsonl                     and host-0.jsonl of a host server, whose updates are
                                                           the pushes that it forwards
      {"format": 1, "plan": "data=4 ...", "workers": 4, "shard": 0, "seed": 0, "updates": 0}
      ["release", 0, 0, 0, 0]          rank 0 takes step 0, with version 0 of the weights
      ["commit", [0, 0]]               its gradient is an update
      ...
      {"updates": 1520, "staleness": [1, 3, 9], "dropped": 0, "refused": {}}

Lines reach the disk every second; the last one is there only if the run came to its end.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, final

from weft.distributed.consistency.record_lines import (
    FORMAT,
    line_of,
    read_after_head,
    read_lines,
    record_file,
    storing,
)
from weft.distributed.consistency.server.decisions import Decision, Join, decode, encode
from weft.errors import RunFolderError

__all__ = ["Journal", "Summary", "journal_file", "read_decisions", "read_summary"]

FLUSH_SECONDS = 1.0
SUBJECT = "what its servers decided"
TROUBLE = "decisions could not be written"

Kind = Literal["shard", "host"]


@dataclass(frozen=True)
class Summary:
    """What a shard did in one training. `staleness[i]` updates were made on weights i updates old."""

    updates: int = 0
    staleness: tuple[int, ...] = ()
    dropped: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    lost: int = 0  # updates that a restored shard knows to be lost
    returned: int = 0  # how often a worker that was lost came back

    @property
    def mean_staleness(self) -> float:
        total = sum(self.staleness)
        return sum(i * count for i, count in enumerate(self.staleness)) / total if total else 0.0


def journal_file(run: Path, seed: int, number: int, kind: Kind = "shard") -> Path:
    return record_file(run, seed, f"{kind}-{number}")


@final
class Journal:
    """Appends decisions to a file. A shard that was restored goes on in the file of the one before it."""

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        *,
        goes_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock = clock
        self._flushed_at = clock()
        with storing(path, TROUBLE):
            path.parent.mkdir(parents=True, exist_ok=True)
            if goes_on and path.exists():
                kept = path.read_bytes()
                path.write_bytes(kept[: kept.rfind(b"\n") + 1])  # without a line that was cut off
            self._file: TextIO = path.open("a" if goes_on else "w", encoding="utf-8")
        if not goes_on:
            self._write({"format": FORMAT, **about})
            self._file.flush()

    def note(self, decision: Decision) -> None:
        self._write(encode(decision))

    def restored(self, version: int) -> None:
        """The shard was lost here, and goes on from a version that it had kept."""
        self._write({"restored": version})

    def end(self, summary: Summary) -> None:
        self._write(asdict(summary))
        self.close()

    def close(self) -> None:
        with storing(self._path, TROUBLE):
            self._file.close()

    def _write(self, line: Any) -> None:
        with storing(self._path, TROUBLE):
            self._file.write(line_of(line))
            if self._clock() - self._flushed_at >= FLUSH_SECONDS:
                self._file.flush()
                self._flushed_at = self._clock()


def read_decisions(run: Path, seed: int, number: int, kind: Kind = "shard") -> list[Decision]:
    """What a shard, or a host server, of a run decided.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    path = journal_file(run, seed, number, kind)
    decisions: list[Decision] = []
    for line in read_after_head(path, SUBJECT, begun="updates"):
        if isinstance(line, list):
            decisions.append(decode(line))
        elif "restored" in line:
            raise RunFolderError(f"run lost a server on the way, and cannot be repeated ({path}); replay another")
    if any(isinstance(decision, Join) for decision in decisions):
        raise RunFolderError(f"a rank of the run was lost and came back, which cannot be repeated ({path})")
    return decisions


def read_summary(run: Path, seed: int, number: int, kind: Kind = "shard") -> Summary | None:
    """What the shard, or the host server, did in all; None where it did not come to its end."""
    last: Any = None
    for last in read_lines(journal_file(run, seed, number, kind), SUBJECT):  # noqa: B007 -- the last line
        pass
    if not isinstance(last, dict) or "updates" not in last:
        return None
    return Summary(**{**last, "staleness": tuple(last["staleness"])})
