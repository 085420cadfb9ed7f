"""The one look of every table: aligned columns, a quiet header, no lines."""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "make_table", "section"]

Column = tuple[str, Literal["left", "right"]]


def make_table(columns: Sequence[Column], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Numbers are never cut or wrapped; only the last column may be folded."""
    headed = any(name for name, _ in columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=headed, header_style="dim")
    for i, (name, justify) in enumerate(columns):
        last = i == len(columns) - 1
        table.add_column(Text(name), justify=justify, no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def section(title: str, content: RenderableType) -> Group:
    """A heading, its content two columns in, and an empty line."""
    return Group(Text(title, style="bold"), Padding(content, (0, 0, 1, 2), expand=False))
