"""The one look of every table: aligned columns, a quiet header, no lines drawn.

Lines are never folded or cut, so that a number stays whole and a command can be copied from a terminal; they are to be
printed with `crop=False`. Only prose, in the last column of `prose_section`, is folded to the width of the console.
"""

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Cell", "aligned", "note", "prose_section", "section"]

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
    return Group(Text(title, "bold"), *(_unbroken(Text(GAP).append_text(line)) for line in lines), Text())


def prose_section(title: str, rows: Iterable[tuple[str, str]]) -> Group:
    """A heading, names with a text each, and an empty line."""
    table = Table(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), show_header=False)
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return Group(Text(title, "bold"), Padding(table, (0, 0, 0, len(GAP))), Text())


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


def _unbroken(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ignore"
    return line
