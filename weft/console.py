"""Where the command line writes: results to the standard output, everything else to the standard error."""

import os

from rich.console import Console

__all__ = ["error_console", "output_console"]

PIPE_WIDTH = 120  # nobody reads a pipe on 80 columns, and a folded table is of no use to grep


def output_console() -> Console:
    return _console(stderr=False)


def error_console() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    # Markup is off: a path or an error text with [brackets] in it must come out as it is.
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console
