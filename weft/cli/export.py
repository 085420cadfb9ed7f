"""`weft export`: the trained weights of a run, in plain files."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or the path of weft.save.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="PATH", help="A file NAME.safetensors, or a folder as Hugging Face lays it out."),
    ],
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="S", help="Of a run with several; the first if not given.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a script's checkpoint; model if not given.")
    ] = None,
) -> None:
    """Write the weights of a run, whatever plan trained it, as one whole model in safetensors."""
    from weft.runs.export import export_run

    for file in export_run(run, out, seed=seed, part=part):
        typer.echo(file)
