"""The decisions of a shard, as data: in their order they repeat a run to the last bit; and how they are read back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.distributed.consistency.control import journal_file, read_events, read_lines
from weft.errors import RunFolderError

__all__ = [
    "DECISIONS",
    "Commit",
    "Decision",
    "Drop",
    "Join",
    "Leave",
    "Push",
    "Release",
    "Summary",
    "read_decisions",
    "read_summary",
]

Push = tuple[int, int]
"""Rank and step."""


@dataclass(frozen=True)
class Commit:
    """One update, made of these pushes (rank, step), added in this order."""

    pushes: tuple[Push, ...]


@dataclass(frozen=True)
class Release:
    """The weights as they are now go to a rank, which takes this step next, or stops.

    `version` counts the updates before; a policy, which knows no weights, leaves it out.
    """

    rank: int
    step: int
    stop: bool = False
    version: int | None = None


@dataclass(frozen=True)
class Drop:
    """A push that has no part in any update."""

    rank: int
    step: int
    reason: Literal["late"] = "late"


@dataclass(frozen=True)
class Leave:
    """A rank is waited for no more: it died, or has done its part."""

    rank: int


@dataclass(frozen=True)
class Join:
    """A rank that was lost is back."""

    rank: int


Decision = Commit | Release | Drop | Leave | Join

DECISIONS = (Commit, Release, Drop, Leave, Join)
"""The events in a journal of a shard or host server."""

SUBJECT = "what its servers decided"

Kind = Literal["shard", "host"]


@dataclass(frozen=True)
class Summary:
    """The deeds of a shard in one training, as counts. `staleness[i]` updates were made on weights i updates old."""

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


def read_decisions(run: Path, seed: int, number: int, kind: Kind = "shard") -> list[Decision]:
    """The decisions of a shard, or of a host server, of a run.

    Args:
        run: the run folder.
        seed: of the training.
        number: of the shard or host server.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    path = journal_file(run, seed, f"{kind}-{number}")
    decisions: list[Decision] = read_events(path, SUBJECT, DECISIONS, begun="updates")
    if any(isinstance(decision, Join) for decision in decisions):
        raise RunFolderError(f"a rank of the run was lost and came back, which cannot be repeated ({path})")
    return decisions


def read_summary(run: Path, seed: int, number: int, kind: Kind = "shard") -> Summary | None:
    """The summary of a shard, or of a host server; None where it did not come to its end.

    Args:
        run: the run folder.
        seed: of the training.
        number: of the shard or host server.
    """
    last: Any = None
    for last in read_lines(journal_file(run, seed, f"{kind}-{number}"), SUBJECT):  # noqa: B007 -- the last line
        pass
    if not isinstance(last, dict) or "updates" not in last:
        return None
    return Summary(**{**last, "staleness": tuple(last["staleness"])})
