"""Options that several sub-commands share."""

from typing import Annotated

import typer

__all__ = ["Json"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
