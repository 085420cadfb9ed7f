"""What ranks print on its way through the launcher: whole lines, every byte kept, and a terminal stays one."""

import os
import pty
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.contract import use_output_to
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.engines.relay import whole_lines

NUM_LINES = 200
PRINTING = RankProgram("tests.processes.plain:print_in_every_way", {"num_lines": NUM_LINES})


@given(st.lists(st.binary(max_size=6).map(lambda text: text.replace(b"\r", b"")), max_size=8))
def test_lines_are_never_torn_nor_lost(pieces: list[bytes]) -> None:
    shown, rest = b"", b""
    for piece in pieces:
        more, rest = whole_lines(rest + piece, b"> ")
        shown += more
    assert b"".join(line.removeprefix(b"> ") for line in shown.splitlines(keepends=True)) + rest == b"".join(pieces)
    assert shown == b"" or (shown.endswith(b"\n") and all(line.startswith(b"> ") for line in shown[:-1].split(b"\n")))


def test_every_line_of_every_rank_is_shown_behind_its_rank(tmp_path: Path) -> None:
    """Also what a library or another program prints past Python, and a last line that has no end."""
    with use_output_to(tmp_path / "shown"):
        run_ranks(PRINTING, 2, shows="all", silent=True, logs=tmp_path / "logs")
    shown = (tmp_path / "shown").read_text().splitlines()
    for rank in range(2):
        own = [line.removeprefix(f"[rank {rank}] ") for line in shown if line.startswith(f"[rank {rank}] ")]
        lines = [f"line {i} of {rank}" for i in range(NUM_LINES)]
        assert own == [*lines, "past python", "to the error", "by a program", "without end"]
        kept = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert kept == "".join(f"{line}\n" for line in own).removesuffix("\n")
    assert len(shown) == 2 * (NUM_LINES + 4)


def test_rank_0_alone_is_shown_as_it_is_and_kept_whole(tmp_path: Path) -> None:
    with use_output_to(tmp_path / "shown"):
        run_ranks(PRINTING, 2, silent=True, logs=tmp_path / "logs")
    assert (tmp_path / "shown").read_text() == (tmp_path / "logs" / "rank-0.log").read_text()
    assert (tmp_path / "logs" / "rank-1.log").read_text().endswith("by a program\nwithout end")


@contextmanager
def use_terminal(columns: int) -> Iterator[list[bytes]]:
    """Standard output and error of this process are a terminal; what was written to it comes at the end."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, columns))
    seen: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(controller, 65536):
                seen.append(chunk)
        except OSError:  # Linux reports the end of the other side as an error
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with use_output_to(Path(os.ttyname(terminal))):
            yield seen
    finally:
        os.close(terminal)
        reader.join()
        os.close(controller)


def test_a_terminal_stays_one_where_the_log_is_kept(tmp_path: Path) -> None:
    with use_terminal(columns=77) as seen:
        run_ranks(RankProgram("tests.processes.plain:print_terminal", {}), 1, logs=tmp_path)
    assert b"".join(seen) == b"True True 77\r\n10%\r20%\r\n"
    assert (tmp_path / "rank-0.log").read_bytes() == b"True True 77\n10%\r20%\n"


def test_a_rank_is_told_that_nobody_reads_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the pipe of `python script.py | head`, in place of waiting for ever."""
    reading, writing = os.pipe()
    os.close(reading)
    with use_output_to(tmp_path / "unused"):
        os.dup2(writing, 1)
        told = run_ranks(RankProgram("tests.processes.plain:print_for_ever", {}), 1, shows="all")
    os.close(writing)
    assert told == ["nobody reads"]
