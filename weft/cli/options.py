"""Options that several sub-commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Device", "Json", "Out", "Plan", "Quiet", "Repeat", "Replay", "Seed", "Settings", "Workers"]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.lr=0.01.")
]
Plan = Annotated[
    str | None, typer.Option(metavar="PLAN", help='How to parallelise, as in "data=2 topology=server(2)".')
]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --plan data=N.")]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="auto (the accelerator, if there is one), cpu, cuda, cuda:1, ... [default: the recipe's]",
    ),
]
Repeat = Annotated[int | None, typer.Option(min=1, metavar="N", help="Train this often, a seed each; 1 if not given.")]
Seed = Annotated[int | None, typer.Option(min=0, metavar="S", help="The first seed; 0 if not given.")]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run folder to make; a new one in runs/ if not given.")
]
Replay = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Repeat the run in this folder, in the order it had, bit for bit."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
