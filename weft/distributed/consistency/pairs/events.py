"""The events that decide a run of ranks that average in pairs, as data: these, in the order of every rank, repeat it.

RUN/decisions/seed-0/rank-1.jsonl
  {"format": 1, "plan": "data=4 consistency=gossip(graph=ring,mix=pair)", "rank": 1, "seed": 0, "first": 0}
  ["deal", 1, 0]          rank 1 takes piece 1 of the work
  ["pair", 2, 0]          rank 2 came with the weights of its turn 0; both have the mean
  ["step", 0, -1]         the gradient of turn 0 is applied, on top of that
  ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.distributed.consistency.control import journal_file, read_events
from weft.errors import RunFolderError

__all__ = [
    "EVENTS",
    "NOBODY",
    "Deal",
    "Event",
    "Look",
    "Mean",
    "Mix",
    "Pair",
    "ReplayPlan",
    "Step",
    "make_replay_plans",
    "rank_journal",
    "read_journal",
    "read_journals",
]

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
"""The events of a rank's journal."""


def rank_journal(run: Path, seed: int, rank: int) -> Path:
    """The file of a rank's journal."""
    return journal_file(run, seed, f"rank-{rank}")


def read_journal(run: Path, seed: int, rank: int) -> list[Event]:
    """The events of a rank's weights, without a line that a crash cut off.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    return read_events(rank_journal(run, seed, rank), "its pairs", EVENTS, begun="first")


def read_journals(run: Path, seed: int, size: int) -> list[list[Event]]:
    """Of all ranks; of one that had died before this seed began there is none, and nothing happened to it."""
    return [read_journal(run, seed, r) if r == 0 or rank_journal(run, seed, r).exists() else [] for r in range(size)]


@dataclass(frozen=True)
class ReplayPlan:
    """The events that a rank repeats.

    Args:
        events: what happens to its weights, in order.
        asks: by turn, whom it brings its weights to; where one died before it could answer there are two.
        partners: by turn that it completed, whose answer it took.
        mixes: by turn that it completed, whose weights it mixed with its own.
        means: by evaluation, whose weights it was of.
    """

    deals: tuple[Deal, ...]
    events: tuple[Event, ...]
    asks: Mapping[int, tuple[int, ...]]
    partners: Mapping[int, int]
    mixes: Mapping[int, tuple[int, ...]]
    means: Mapping[int, tuple[int, ...]]

    def has_completed(self, turn: int) -> bool:
        return turn in self.partners or turn in self.mixes


def make_replay_plans(journals: Sequence[Sequence[Event]]) -> list[ReplayPlan]:
    """From the journals of all ranks to what each is to do. Copies that rank 0 never got are left out.

    Raises:
        RunFolderError: a rank took an answer that no other rank knows of.
    """
    means = {event.number: event.ranks for event in journals[0] if isinstance(event, Mean)}
    asks: list[dict[int, tuple[int, ...]]] = [{} for _ in journals]
    for answering, events in enumerate(journals):
        for event in events:
            if isinstance(event, Pair):
                asks[event.rank][event.turn] = (*asks[event.rank].get(event.turn, ()), answering)
    for rank, events in enumerate(journals):
        for event in events:
            if isinstance(event, Step) and event.partner not in (NOBODY, *asks[rank].get(event.turn, ())):
                numbers = f"rank: {rank}, turn: {event.turn}, partner: {event.partner}"
                raise RunFolderError(
                    f"records of the ranks do not fit together ({numbers}); bring them into one folder"
                )
    return [
        ReplayPlan(
            deals=tuple(event for event in events if isinstance(event, Deal)),
            events=tuple(event for event in events if _is_repeated(event, rank, means)),
            asks=asks[rank],
            partners={event.turn: event.partner for event in events if isinstance(event, Step)},
            mixes={event.turn: event.ranks for event in events if isinstance(event, Mix)},
            means=means,
        )
        for rank, events in enumerate(journals)
    ]


def _is_repeated(event: Event, rank: int, means: Mapping[int, tuple[int, ...]]) -> bool:
    match event:
        case Look(number):
            return rank in means.get(number, ())
        case Pair() | Step() | Mix():
            return True
        case _:
            return False
