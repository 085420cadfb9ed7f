"""A stream that keeps what it shows: text, terminals and characters come out as they would without it."""

import io
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from weft.engines.tee import Tee


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_text_is_shown_and_kept_at_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    tee = Tee(stream, tmp_path / "log")
    print("one", file=tee)
    tee.writelines(["two\n"])
    assert stream.getvalue() == (tmp_path / "log").read_text() == "one\ntwo\n"


def test_two_streams_share_a_log_in_the_order_of_their_lines(tmp_path: Path) -> None:
    out, error = Tee(io.StringIO(), tmp_path / "log"), Tee(io.StringIO(), tmp_path / "log")
    for number, tee in enumerate((out, error, out)):
        print(number, file=tee)
    assert (tmp_path / "log").read_text() == "0\n1\n2\n"


def test_a_terminal_stays_one_and_strange_characters_are_kept_in_some_way(tmp_path: Path) -> None:
    tee = Tee(Terminal(), tmp_path / "log")
    assert tee.isatty() and Console(file=cast(TextIO, tee)).is_terminal
    tee.write("\u2713\n")
    assert (tmp_path / "log").read_text() == "\\u2713\n"
