"""Run folders: made once, never over another, and with a log that survives a crash."""

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from weft.errors import CorruptFileError, RunFolderError, StorageError
from weft.records.record_file import new_record, write_record
from weft.records.run_folder import RunFolder, create_run_folder, open_run_folder, use_alone


def test_a_new_folder_is_empty_and_knows_its_files(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path / "deep" / "run", "digits_mlp")
    assert os.listdir(folder.path) == []
    assert folder.record_file == tmp_path / "deep" / "run" / "record.json"
    assert folder.log_file == tmp_path / "deep" / "run" / "log.jsonl"
    assert folder.checkpoint == tmp_path / "deep" / "run" / "checkpoint"


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    assert create_run_folder(tmp_path, "digits_mlp") == RunFolder(tmp_path)


def test_two_runs_in_the_same_second_get_two_folders(tmp_path: Path) -> None:
    first, second = (create_run_folder(None, "digits_mlp", root=tmp_path) for _ in range(2))
    assert first != second
    assert all(
        folder.path.parent == tmp_path and folder.path.name.startswith("digits_mlp-2") for folder in (first, second)
    )


@pytest.mark.parametrize("name", ["my/recipes.py:tiny", "../../etc/x.py:f", "/abs.py:f", "a b\n", "..", ""])
def test_a_recipe_path_becomes_one_plain_name(tmp_path: Path, name: str) -> None:
    folder = create_run_folder(None, name, root=tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.name[0].isalnum() and not set(folder.path.name) & set("/: \n")


def test_a_folder_that_holds_a_run_is_refused_with_the_cure(tmp_path: Path) -> None:
    write_record(tmp_path, new_record("tiny"))
    with pytest.raises(RunFolderError, match=rf"holds a run already .*--resume {tmp_path} or choose another --out"):
        create_run_folder(tmp_path, "tiny")


def test_a_folder_with_any_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match=r"not empty and holds no run .*--out"):
        create_run_folder(tmp_path, "tiny")
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("below", ["file", "file/run"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="file is in the way"):
        create_run_folder(tmp_path / below, "tiny")


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "mkdir", no_space)
    with pytest.raises(StorageError, match="No space left"):
        create_run_folder(tmp_path / "run", "tiny")


def test_only_a_folder_with_a_record_is_opened(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such run folder"):
        open_run_folder(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"not a run folder, for it has no record.json"):
        open_run_folder(tmp_path)
    write_record(tmp_path, new_record("tiny"))
    assert open_run_folder(tmp_path) == RunFolder(tmp_path)


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    entries: list[dict[str, Any]] = [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": math.inf, "text": "two\nlines \u2028"},
    ]
    for entry in entries:
        folder.append_log(entry)
    assert folder.read_log() == entries
    assert folder.log_file.read_bytes().count(b"\n") == 2


def test_no_log_yet_is_an_empty_log(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read_log() == []


def test_a_line_that_a_crash_cut_off_is_left_out_and_then_replaced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_log({"step": 1})
    folder.append_log({"step": 2})
    whole = folder.log_file.read_bytes()
    for length in range(len(whole)):
        folder.log_file.write_bytes(whole[:length])
        before = folder.read_log()
        assert before == [{"step": 1}, {"step": 2}][: whole[:length].count(b"\n")]
        folder.append_log({"step": 3})
        assert folder.read_log() == [*before, {"step": 3}]


@pytest.mark.parametrize("line", [b'{"step": \n', b"[1]\n", b"\xff\n", b"NaN\n", b"\n"])
def test_a_bad_line_that_no_crash_explains_is_named(tmp_path: Path, line: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.log_file.write_bytes(b'{"step": 1}\n' + line + b'{"step": 3}\n')
    with pytest.raises(CorruptFileError, match=r"log.jsonl:2.*; remove the line"):
        folder.read_log()


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"log could not be written .*; free space"):
        RunFolder(tmp_path / "gone").append_log({"step": 1})


def no_space(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    """Once two `--resume` of one run wrote over each other's checkpoints."""
    folder = create_run_folder(tmp_path / "run", "digits_mlp")
    with use_alone(folder):
        is_told = pytest.raises(RunFolderError, match=r"under way in another process \(.*run\); wait for its end")
        with is_told, use_alone(folder):
            pass
        with use_alone(create_run_folder(tmp_path / "other", "digits_mlp")):
            assert os.listdir(folder.path) == []
    with use_alone(folder):
        pass


def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _how: int) -> NoReturn:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with use_alone(RunFolder(tmp_path)):
        pass


def test_the_lock_goes_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from weft.records.run_folder import RunFolder, use_alone\n"
        "with use_alone(RunFolder(Path(sys.argv[1]))):\n"
        "    print('locked', flush=True)\n"
        "    input()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(RunFolderError, match="under way"), use_alone(RunFolder(tmp_path)):
            pass
        process.kill()
    with use_alone(RunFolder(tmp_path)):
        pass
