"""What decides a run of ranks that average in pairs, as data: these, in the order of every rank, repeat it."""

from dataclasses import dataclass
from typing import Any

from weft.errors import CorruptFileError

__all__ = ["NOBODY", "Deal", "Event", "Look", "Mean", "Mix", "Pair", "Step", "decode", "encode"]

NOBODY = -1
"""The partner of a rank that answers, or that went alone."""


@dataclass(frozen=True)
class Deal:
    """This rank takes this piece of work for its next turn, or stops: piece i is share i mod N of batch i div N."""

    work: int
    stop: bool = False


@dataclass(frozen=True)
class Pair:
    """A rank that asks brought its weights of its turn: both now have the mean of the two."""

    rank: int
    turn: int


@dataclass(frozen=True)
class Step:
    """This rank made its own update of a turn, on the mean with this partner."""

    turn: int
    partner: int = NOBODY


@dataclass(frozen=True)
class Mix:
    """This rank made its own update of a turn, on the mean with these neighbours."""

    turn: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """Rank 0 took a copy of the weights, for its evaluation of this number."""

    number: int


@dataclass(frozen=True)
class Mean:
    """The ranks whose copies an evaluation was of. Rank 0 notes it."""

    number: int
    ranks: tuple[int, ...]


Event = Deal | Pair | Step | Mix | Look | Mean


def encode(event: Event) -> list[Any]:
    """
    >>> encode(Mean(2, (0, 1, 3)))
    ['mean', 2, 0, 1, 3]
    """
    match event:
        case Deal(work, stop):
            return ["deal", work, int(stop)]
        case Pair(rank, turn):
            return ["pair", rank, turn]
        case Step(turn, partner):
            return ["step", turn, partner]
        case Mix(turn, ranks):
            return ["mix", turn, *ranks]
        case Look(number):
            return ["look", number]
        case Mean(number, ranks):
            return ["mean", number, *ranks]


def decode(line: Any) -> Event:
    """What `encode` wrote. Raises CorruptFileError for anything else."""
    if isinstance(line, list) and line and all(type(value) is int for value in line[1:]):
        match line:
            case ["deal", work, stop]:
                return Deal(work, bool(stop))
            case ["pair", rank, turn]:
                return Pair(rank, turn)
            case ["step", turn, partner]:
                return Step(turn, partner)
            case ["mix", turn, *ranks]:
                return Mix(turn, tuple(ranks))
            case ["look", number]:
                return Look(number)
            case ["mean", number, *ranks]:
                return Mean(number, tuple(ranks))
    raise CorruptFileError(f"event cannot be read ({line!r}); the file was changed, or is of a newer version")
