"""`weft show`: the result of a run."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Json

__all__ = ["show"]


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    json: Json = False,
) -> None:
    """Show the result of a run."""
    from weft.cli.output import print_json, print_tables, record_document
    from weft.records.record_file import read_record
    from weft.report.summary import render_run

    record = read_record(run)
    if json:
        print_json(record_document(record, run))
    else:
        print_tables(render_run(record, details=True))
