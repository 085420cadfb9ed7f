"""What is recorded of gossiping ranks, and read back for a replay."""

from pathlib import Path

import pytest

from weft.distributed.consistency.control import Journal, decode, encode
from weft.distributed.consistency.pairs.events import (
    EVENTS,
    Deal,
    Event,
    Look,
    Mean,
    Pair,
    Step,
    make_replay_plans,
    rank_journal,
    read_journal,
)
from weft.errors import CorruptFileError, RunFolderError, StorageError

NOTED: list[Event] = [Deal(4), Pair(2, 7), Step(3, 1), Look(2), Mean(2, (0, 1)), Deal(9, stop=True)]


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert [decode(encode(event), EVENTS) for event in NOTED] == NOTED
    journal = Journal(rank_journal(tmp_path, 0, 1), {"first": 0})
    for event in NOTED:
        journal.note(event)
    assert read_journal(tmp_path, 0, 1) == NOTED  # before it is closed: a killed rank closes nothing
    journal.close()
    path = rank_journal(tmp_path, 0, 1)
    path.write_bytes(path.read_bytes() + b'["pair",2')
    assert read_journal(tmp_path, 0, 1) == NOTED


@pytest.mark.parametrize("line", [["pair", 1], ["pear", 1, 2], ["step", 1, "2"], ["deal", True, 0], {}, 7, []])
def test_what_is_no_event_is_refused(line: object) -> None:
    with pytest.raises(CorruptFileError, match="cannot be read"):
        decode(line, EVENTS)


def test_records_that_cannot_be_repeated_are_refused(tmp_path: Path) -> None:
    path = rank_journal(tmp_path, 0, 0)
    Journal(path, {"first": 8}).close()
    with pytest.raises(RunFolderError, match="resumed"):
        read_journal(tmp_path, 0, 0)
    for text, fact in (('{"format": 9}\n', "of this version"), ("{\n", "bad line"), ("[1]\n", "of this version")):
        path.write_text(text)
        with pytest.raises(CorruptFileError, match=fact):
            read_journal(tmp_path, 0, 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not be written"):
        Journal(tmp_path / "file" / "rank-0.jsonl", {})


def test_replays_know_whom_a_rank_asked_in_vain() -> None:
    """Rank 1 answered rank 0 and died before the answer left; rank 0 took that of rank 3."""
    asking: list[Event] = [Deal(0), Step(0, 3), Look(0), Mean(0, (0, 2, 3))]
    answered: list[Event] = [Deal(1), Pair(0, 0), Look(0)]
    first, second, *_ = make_replay_plans([asking, answered, [Look(0)], [Pair(0, 0), Step(0), Look(0)]])
    assert (first.asks, first.partners) == ({0: (1, 3)}, {0: 3})
    assert first.events == (Step(0, 3), Look(0)) and second.events == (Pair(0, 0),)
    assert first.means == {0: (0, 2, 3)}
    with pytest.raises(RunFolderError, match="do not fit together"):
        make_replay_plans([asking, answered, [], []])
