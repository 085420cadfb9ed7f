"""Columns line up, long lines stay whole, prose is folded."""

import io

from rich.console import Console, RenderableType
from rich.text import Text

from weft.report.table import Cell, Prose, aligned, section


def lines_at(width: int, content: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(content, crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows: list[tuple[Cell, ...]] = [("a", "1", "x"), ("bbbb", "1,000", Text("yy"))]
    assert [line.plain for line in aligned("lrl", rows)] == ["a         1  x", "bbbb  1,000  yy"]


def test_no_rows_and_no_headers_give_no_lines() -> None:
    assert aligned("ll", []) == []


def test_long_line_is_neither_folded_nor_cut() -> None:
    command = "curl -fL " + "x" * 200
    assert lines_at(40, section("data", aligned("ll", [("mnist", command)]))) == ["data", f"  mnist  {command}", ""]


def test_lines_have_no_trailing_space() -> None:
    shown = lines_at(40, section("t", aligned("ll", [("a", ""), ("", ""), ("b", "long text")])))
    assert shown == ["t", "  a", "", "  b  long text", ""]


def test_prose_is_folded_under_its_own_column() -> None:
    shown = lines_at(30, Prose("recipes", [("one", "a text that does not fit in"), ("three", "short")]))
    assert shown == ["recipes", "  one    a text that does not", "         fit in", "  three  short", ""]


def test_brackets_are_no_markup() -> None:
    assert lines_at(40, section("t", [Text("a [red] herring")]))[1] == "  a [red] herring"
