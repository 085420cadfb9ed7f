"""What a shard decides, as data: these, in their order, repeat a run to the last bit."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["DECISIONS", "Commit", "Decision", "Drop", "DropReason", "Join", "Leave", "Push", "Release"]

DropReason = Literal["late"]

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
    reason: DropReason = "late"


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
"""What a journal of a shard or host server may hold."""
