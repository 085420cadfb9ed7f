"""The one look of every table: aligned columns, a quiet header, no lines drawn.

Lines are never folded or cut, so that a number stays whole and a command can be copied from a terminal; they are to be
printed with `crop=False`. Only prose is folded to the width of the console.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

__all__ = ["Cell", "Prose", "aligned", "note", "section"]

Cell = str | Text

GAP = "  "


def aligned(align: str, rows: Iterable[Sequence[Cell]], headers: Sequence[str] = ()) -> list[Text]:
    """One line per row, its columns aligned as `align` says, a letter each: `l` left, `r` right.

    >>> [line.plain for line in aligned("lr", [("loss", "0.5"), ("accuracy", "0.97")], ("metric", "median"))]
    ['metric    median', 'loss         0.5', 'accuracy    0.97']
    """
    cells = [[_text(cell) for cell in row] for row in rows]
    if headers:
        cells.insert(0, [Text(header, "dim") for header in headers])
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    return [_line(row, widths, align) for row in cells]


def section(title: str, lines: Iterable[Text]) -> Group:
    """A heading, its lines two columns in, and an empty line."""
    return Group(Text(title, "bold"), *map(_indented, lines), Text())


@dataclass(frozen=True)
class Prose:
    """A section of names with a text each, folded to the width of the console."""

    title: str
    rows: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        taken = max((len(name) for name, _ in self.rows), default=0) + 2 * len(GAP)
        folded = [(name, textwrap.wrap(text, max(options.max_width - taken, 20))) for name, text in self.rows]
        cells = [("" if i else name, line) for name, lines in folded for i, line in enumerate(lines)]
        yield section(self.title, aligned("ll", cells))


def note(text: str) -> Text:
    """A remark that helps to read a table."""
    return Text(text, "dim")


def _line(cells: Sequence[Text], widths: Sequence[int], align: str) -> Text:
    line = Text()
    for i, (cell, width, letter) in enumerate(zip(cells, widths, align, strict=True)):
        space = " " * (width - cell.cell_len)
        line.append(GAP if i else "")
        line.append_text(Text(space).append_text(cell) if letter == "r" else cell.copy().append(space))
    line.rstrip()
    return line


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _indented(line: Text) -> Text:
    text = Text(GAP, no_wrap=True, overflow="ignore").append_text(line)
    text.rstrip()
    return text
