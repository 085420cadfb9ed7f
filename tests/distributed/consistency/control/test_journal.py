"""Journals: every decision and event has one spelling, which old runs can still be read by."""

from pathlib import Path
from typing import Any

import pytest

from weft.distributed.consistency.control import Journal, decode, encode, journal_file, read_events, read_lines
from weft.distributed.consistency.pairs.events import EVENTS, Deal, Look, Mean, Mix, Pair, Step
from weft.distributed.consistency.server.decisions import DECISIONS, Commit, Drop, Join, Leave, Release
from weft.errors import CorruptFileError

LINES: dict[object, list[Any]] = {
    Commit(((1, 7), (2, 7))): ["commit", [1, 7], [2, 7]],
    Release(3, 5): ["release", 3, 5, 0, -1],
    Release(3, 5, stop=True, version=9): ["release", 3, 5, 1, 9],
    Drop(1, 4): ["drop", 1, 4, "late"],
    Leave(2): ["leave", 2],
    Join(2): ["join", 2],
    Deal(6, stop=True): ["deal", 6, 1],
    Pair(2, 0): ["pair", 2, 0],
    Step(4): ["step", 4, -1],
    Mix(3, (0, 2)): ["mix", 3, 0, 2],
    Mix(3, ()): ["mix", 3],
    Look(1): ["look", 1],
    Mean(2, (0, 1, 3)): ["mean", 2, 0, 1, 3],
}


@pytest.mark.parametrize("event", LINES, ids=str)
def test_the_spelling_on_disk_stays(event: object) -> None:
    """Runs that were recorded by earlier versions are replayed."""
    assert encode(event) == LINES[event]
    assert decode(LINES[event], (*DECISIONS, *EVENTS)) == event


@pytest.mark.parametrize(
    "line",
    [
        *(["commit"], ["commit", [1]], ["commit", 1, 2], ["drop", 1, 2, "early"], ["drop", 1, 2, 3]),
        *(["release", 1, 2, 0], ["leave"], ["leave", 1, 2], ["leave", True], ["mix"], ["mix", 1, "2"], ["rise", 1]),
        *([], {}, None),
    ],
)
def test_anything_else_is_damage(line: object) -> None:
    with pytest.raises(CorruptFileError, match="cannot be read"):
        decode(line, (*DECISIONS, *EVENTS))


def test_a_journal_without_a_path_writes_nothing() -> None:
    journal = Journal(None, {"plan": "data=2"})
    journal.note(Leave(1))
    journal.end(Leave(1))


def test_each_line_is_on_disk_before_anybody_can_learn_of_it(tmp_path: Path) -> None:
    path = journal_file(tmp_path, 3, "rank-0")
    journal = Journal(path, {"first": 0})
    journal.note(Pair(1, 0))
    assert path == tmp_path / "decisions/seed-3/rank-0.jsonl"
    assert list(read_lines(path, "its pairs")) == [{"format": 1, "first": 0}, ["pair", 1, 0]]
    assert read_events(path, "its pairs", EVENTS, begun="first") == [Pair(1, 0)]
    journal.close()
