"""The compiler behind a cache: by content, whole or absent, and its own words when it refuses."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weft.errors import CompilerError
from weft.operators.compile import cache_folder, compile_library, find_compiler

SOURCE = '#include "number.h"\nextern "C" int answer() { return NUMBER; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_source(folder: Path, number: str) -> list[Path]:
    (folder / "answer.cpp").write_text(SOURCE)
    (folder / "number.h").write_text(f"#define NUMBER {number}\n")
    return [folder / "answer.cpp", folder / "number.h"]


def test_a_library_is_built_once_per_content_of_all_sources(tmp_path: Path) -> None:
    first = compile_library(write_source(tmp_path, "42"))
    built = first.stat().st_mtime_ns
    assert compile_library(write_source(tmp_path, "42")).stat().st_mtime_ns == built
    second = compile_library(write_source(tmp_path, "43"))
    assert (ctypes.CDLL(str(first)).answer(), ctypes.CDLL(str(second)).answer()) == (42, 43)
    assert first.parent == cache_folder() == tmp_path / "cache" / "weft"


def test_flags_are_part_of_the_key(tmp_path: Path) -> None:
    sources = write_source(tmp_path, "42")
    assert compile_library(sources, flags=["-shared", "-fPIC"]) != compile_library(sources, flags=["-shared", "-fpic"])


def test_a_refused_source_shows_what_the_compiler_said_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CompilerError, match="banana"):
        compile_library(write_source(tmp_path, "banana"))
    assert list(cache_folder().iterdir()) == []


def test_several_may_build_at_once(tmp_path: Path) -> None:
    sources = write_source(tmp_path, "7")
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: compile_library(sources), range(4)))
    assert len(set(paths)) == 1
    assert list(cache_folder().iterdir()) == [paths[0]]
    assert ctypes.CDLL(str(paths[0])).answer() == 7


def test_no_compiler_is_said_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerError, match="no-such-compiler"):
        find_compiler()
    monkeypatch.setenv("WEFT_NO_COMPILER", "1")
    with pytest.raises(CompilerError, match="switched off"):
        find_compiler()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CompilerError, match="XDG_CACHE_HOME"):
        compile_library(write_source(tmp_path, "1"))
