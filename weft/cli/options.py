"""Options that several sub-commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Json", "Run"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/digits_mlp-1.", show_default=False)
]
