"""The record of decisions: written as they are taken, read to the last whole line."""

from pathlib import Path

import pytest

from weft.distributed.consistency.control import Journal, journal_file
from weft.distributed.consistency.server import Commit, Decision, Join, Release
from weft.distributed.consistency.server.decisions import Summary, read_decisions, read_summary
from weft.errors import CorruptFileError, RunFolderError, StorageError

DECISIONS: list[Decision] = [Release(0, 0, version=0), Commit(((0, 0),)), Release(0, 1, stop=True, version=1)]
SUMMARY = Summary(updates=1, staleness=(1,), refused={"late": 2})


def write(run: Path, decisions: list[Decision], summary: Summary | None = SUMMARY, **about: object) -> Path:
    path = journal_file(run, 0, "shard-0")
    journal = Journal(path, about)
    for decision in decisions:
        journal.note(decision)
    if summary is None:
        journal.close()
    else:
        journal.end(summary)
    return path


def test_what_was_noted_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, DECISIONS)
    assert read_decisions(tmp_path, 0, 0) == DECISIONS
    assert read_summary(tmp_path, 0, 0) == SUMMARY
    assert SUMMARY.mean_staleness == 0.0 and Summary(staleness=(1, 0, 1)).mean_staleness == 1.0


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, DECISIONS, None)
    path.write_bytes(path.read_bytes()[:-3])
    assert read_decisions(tmp_path, 0, 0) == DECISIONS[:-1]
    assert read_summary(tmp_path, 0, 0) is None


def test_a_restored_server_goes_on_in_the_same_file_which_cannot_be_replayed(tmp_path: Path) -> None:
    path = write(tmp_path, DECISIONS, None)
    path.write_bytes(path.read_bytes()[:-3])
    Journal(path, {}, restored=0).end(SUMMARY)
    assert read_summary(tmp_path, 0, 0) == SUMMARY
    with pytest.raises(RunFolderError, match="lost a server on the way"):
        read_decisions(tmp_path, 0, 0)


def test_lines_reach_the_disk_on_the_way(tmp_path: Path) -> None:
    now = [0.0]
    journal = Journal(journal_file(tmp_path, 0, "shard-0"), {}, flush_seconds=1.0, clock=lambda: now[0])
    journal.note(DECISIONS[0])
    assert read_decisions(tmp_path, 0, 0) == []
    now[0] = 2.0
    journal.note(DECISIONS[1])
    assert read_decisions(tmp_path, 0, 0) == DECISIONS[:2]
    journal.close()


def test_what_cannot_be_repeated_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [*DECISIONS, Join(1)])
    with pytest.raises(RunFolderError, match="came back"):
        read_decisions(tmp_path, 0, 0)
    write(tmp_path, DECISIONS, updates=40)
    with pytest.raises(RunFolderError, match="was resumed"):
        read_decisions(tmp_path, 0, 0)


@pytest.mark.parametrize("text", ["", '{"format":99}\n', "[1]\n", '{"format":1}\nx\n', '{"format":1}\n["commit"]\n'])
def test_damage_is_found(text: str, tmp_path: Path) -> None:
    path = journal_file(tmp_path, 0, "shard-0")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(CorruptFileError):
        read_decisions(tmp_path, 0, 0)


def test_trouble_with_the_disk_is_told(tmp_path: Path) -> None:
    (tmp_path / "decisions").write_text("in the way")
    with pytest.raises(StorageError, match="decisions could not be written"):
        Journal(journal_file(tmp_path, 0, "shard-0"), {})
