"""What a shard decides, as data: these, in their order, repeat a run to the last bit."""

from dataclasses import dataclass
from typing import Any, Literal

from weft.errors import CorruptFileError

__all__ = ["Commit", "Decision", "Drop", "DropReason", "Join", "Leave", "Push", "Release", "decode", "encode"]

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


def encode(decision: Decision) -> list[Any]:
    """
    >>> encode(Commit(((1, 7), (2, 7))))
    ['commit', [1, 7], [2, 7]]
    """
    match decision:
        case Commit(pushes):
            return ["commit", *(list(push) for push in pushes)]
        case Release(rank, step, stop, version):
            return ["release", rank, step, int(stop), -1 if version is None else version]
        case Drop(rank, step, reason):
            return ["drop", rank, step, reason]
        case Leave(rank):
            return ["leave", rank]
        case Join(rank):
            return ["join", rank]


def decode(line: Any) -> Decision:
    """What `encode` wrote. Raises CorruptFileError for anything else."""
    match line:
        case ["commit", *pushes] if pushes and all(_are_numbers(push, 2) for push in pushes):
            return Commit(tuple((rank, step) for rank, step in pushes))
        case ["release", *numbers] if _are_numbers(numbers, 4):
            rank, step, stop, version = numbers
            return Release(rank, step, bool(stop), None if version < 0 else version)
        case ["drop", int(rank), int(step), "late"]:
            return Drop(rank, step, "late")
        case ["leave", int(rank)]:
            return Leave(rank)
        case ["join", int(rank)]:
            return Join(rank)
    raise CorruptFileError(f"decision cannot be read ({line!r}); the file was changed, or is of a newer version")


def _are_numbers(values: Any, length: int) -> bool:
    return isinstance(values, list) and len(values) == length and all(type(value) is int for value in values)
