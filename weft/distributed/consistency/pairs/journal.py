"""The record of what happened to a rank's weights: JSON lines, one file for each seed and rank.

    RUN/decisions/seed-0/rank-1.jsonl
      {"format": 1, "plan": "data=4 consistency=gossip(graph=ring,mix=pair)", "rank": 1, "seed": 0, "first": 0}
      ["deal", 1, 0]          rank 1 takes piece 1 of the work
      ["pair", 2, 0]          rank 2 came with the weights of its turn 0; both have the mean
      ["step", 0, -1]         the gradient of turn 0 is applied, on top of that
      ...

A line is with the operating system before anybody learns of what it says: what a killed rank did is known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from weft.distributed.consistency.pairs.events import NOBODY, Deal, Event, Look, Mean, Mix, Pair, Step, decode, encode
from weft.distributed.consistency.record_lines import FORMAT, line_of, read_after_head, record_file, storing
from weft.errors import RunFolderError

__all__ = ["Journal", "Script", "journal_file", "make_scripts", "read_events", "read_journals"]

TROUBLE = "pairs could not be recorded"


def journal_file(run: Path, seed: int, rank: int) -> Path:
    return record_file(run, seed, f"rank-{rank}")


@final
class Journal:
    """Appends events to a file. Whoever notes holds the lock of what the event changed."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        with storing(path, TROUBLE):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", buffering=1)
            self._file.write(line_of({"format": FORMAT, **about}))

    def note(self, event: Event) -> None:
        with storing(self._path, TROUBLE):
            self._file.write(line_of(encode(event)))

    def close(self) -> None:
        with storing(self._path, TROUBLE):
            self._file.close()


def read_events(run: Path, seed: int, rank: int) -> list[Event]:
    """What happened to a rank's weights, without a line that a crash cut off.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    lines = read_after_head(journal_file(run, seed, rank), "its pairs", begun="first")
    return [decode(line) for line in lines]


def read_journals(run: Path, seed: int, size: int) -> list[list[Event]]:
    """Of all ranks; of one that had died before this seed began there is none, and nothing happened to it."""
    return [read_events(run, seed, r) if r == 0 or journal_file(run, seed, r).exists() else [] for r in range(size)]


@dataclass(frozen=True)
class Script:
    """What a rank is to do again.

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


def make_scripts(journals: Sequence[Sequence[Event]]) -> list[Script]:
    """From the journals of all ranks to the script of each. Copies that rank 0 never got are left out.

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
        Script(
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
