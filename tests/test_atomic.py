"""Files and folders that are whole or absent: under a full disk, a read-only one, a kill and a bad value."""

import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from weft.atomic import use_new_folder, write_json, write_text
from weft.errors import StorageError


def no_space(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt(*_: Any, **__: Any) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def use_file_limit(num_bytes: int) -> Iterator[None]:
    """A real limit of the system on the size of any file: a write beyond it fails half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_text_is_written_and_written_over(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "a.txt"
    write_text(file, "one")
    write_text(file, "zwei — ∞")
    assert file.read_text(encoding="utf-8") == "zwei — ∞"
    assert os.listdir(file.parent) == ["a.txt"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "one")
    with use_new_folder(tmp_path / "folder"):
        pass
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "folder").stat().st_mode == plain.stat().st_mode
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode) & 0o666


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(StorageError, match=r"could not be written \(.*a.txt: No space left on device\); free space"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_write_that_the_system_cuts_off_leaves_the_old_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "old")
    with use_file_limit(5000), pytest.raises(StorageError, match="File too large"):
        write_text(tmp_path / "a.txt", "new" * 10_000)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_interrupt_leaves_the_old_file_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_text_that_has_no_encoding_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "\ud800")
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another --out"):
        write_text(tmp_path / "file" / "a.txt", "new")
    with pytest.raises(StorageError), use_new_folder(tmp_path / "file" / "folder"):
        pass


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"deep": [float("-inf")]}])
def test_json_that_is_not_strict_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", value)
    assert os.listdir(tmp_path) == []


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with use_new_folder(tmp_path / "up" / "folder") as scratch:
        (scratch / "inner").mkdir()
        (scratch / "inner" / "a.txt").write_text("one")
        assert not (tmp_path / "up" / "folder").exists()
    assert (tmp_path / "up" / "folder" / "inner" / "a.txt").read_text() == "one"
    assert os.listdir(tmp_path / "up") == ["folder"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_no_folder(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), use_new_folder(tmp_path / "folder") as scratch:
        (scratch / "a.txt").write_text("one")
        raise error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(os, call, no_space)
    with pytest.raises(StorageError, match="No space left"), use_new_folder(tmp_path / "folder") as scratch:
        (scratch / "a.txt").write_text("one")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_inside_the_block_is_a_storage_error(tmp_path: Path) -> None:
    with use_file_limit(5000), pytest.raises(StorageError), use_new_folder(tmp_path / "folder") as scratch:
        (scratch / "a.bin").write_bytes(bytes(100_000))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    write_text(tmp_path / "folder" / "old.txt", "old")
    with pytest.raises(StorageError, match="not empty"), use_new_folder(tmp_path / "folder"):
        pass
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(tmp_path / "folder") == ["old.txt"]
