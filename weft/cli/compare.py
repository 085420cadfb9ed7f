"""`weft compare`: two runs, and whether they differ."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import Json

__all__ = ["compare"]


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The folder of the base.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The folder that is judged.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Compare runs of different problems or data.")] = False,
    json: Json = False,
) -> None:
    """Compare two runs, and say whether they differ."""
    from weft.cli.output import print_json, print_tables
    from weft.records.record_file import read_record
    from weft.report.comparison import check_comparable, compare_runs, render_comparison

    a, b = read_record(run_a), read_record(run_b)
    if not force:
        check_comparable(a, b)
    comparison = compare_runs(a, b)
    if json:
        print_json({"a": str(run_a), "b": str(run_b), "comparison": comparison})
    else:
        print_tables(render_comparison(comparison, str(run_a), str(run_b)))
