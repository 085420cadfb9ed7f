"""Options that several sub-commands share."""

from typing import Annotated

import typer

__all__ = ["Json", "Plan", "Settings", "Workers"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.lr=0.01.")
]
Plan = Annotated[
    str | None, typer.Option(metavar="PLAN", help='How to parallelise, as in "data=2 topology=server(2)".')
]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --plan data=N.")]
