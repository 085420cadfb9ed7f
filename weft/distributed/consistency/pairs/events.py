"""What decides a run of ranks that average in pairs, as data: these, in the order of every rank, repeat it."""

from dataclasses import dataclass

__all__ = ["EVENTS", "NOBODY", "Deal", "Event", "Look", "Mean", "Mix", "Pair", "Step"]

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

EVENTS = (Deal, Pair, Step, Mix, Look, Mean)
"""What a journal of a rank may hold."""
