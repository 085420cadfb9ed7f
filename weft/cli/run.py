"""`weft run`: train a recipe, or go on with a run that was interrupted."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Json
from weft.errors import TrainingError

if TYPE_CHECKING:
    from weft.metrics.record import RunRecord

__all__ = ["run"]


def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A built-in name or file.py:function; see `weft list`.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.lr=0.01.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train this often, a seed each; 1 if not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, metavar="S", help="The first seed; 0 if not given.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder to make; a new one in runs/ if not given.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder, to the same bits.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    json: Json = False,
) -> None:
    """Train a recipe and say whether the result is accepted."""
    from weft.cli.job import execute, new_job, resumed_job
    from weft.metrics.record_file import read_record

    if resume is None:
        job = new_job(recipe, settings or [], num_seeds=repeat or 1, first_seed=seed or 0, out=out)
    else:
        fixed = {"--set": settings, "--repeat": repeat, "--seed": seed, "--out": out}
        job = resumed_job(resume, recipe, [option for option, value in fixed.items() if value is not None])
    try:
        record = execute(job, quiet=quiet)
    except TrainingError:
        _print_result(read_record(job.folder.path), job.folder.path, json=json)
        raise
    _print_result(record, job.folder.path, json=json)
    raise typer.Exit(0 if record.accepted else 1)


def _print_result(record: "RunRecord", path: Path, *, json: bool) -> None:
    from weft.cli.output import print_json, print_tables
    from weft.report import render_run

    if json:
        print_json({"path": str(path), "accepted": record.accepted, "record": record})
    else:
        print_tables(render_run(record))
        print(f"run folder: {path}")
