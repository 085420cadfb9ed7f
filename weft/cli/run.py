"""`weft run`: train a recipe, or go on with a run that was interrupted."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from weft.cli.options import Device, Init, Json, Out, Plan, Quiet, Repeat, Replay, Seed, Settings, Workers
from weft.console import error_console

if TYPE_CHECKING:
    from weft.records.record import RunRecord

__all__ = ["run"]


def run(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A built-in name or file.py:function; see `weft list`.")
    ] = None,
    settings: Settings = None,
    plan: Plan = None,
    workers: Workers = None,
    device: Device = None,
    init: Init = None,
    repeat: Repeat = None,
    seed: Seed = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder, to the same bits.")
    ] = None,
    replay: Replay = None,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Start lost workers again, so often in all; 0 if not given."),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a recipe and say whether the result is accepted. With --replay, repeat a run, also that of a script."""
    from weft.engines.fork_server import is_first_rank, start_fork_server

    if replay is not None and (replay / "script.json").is_file():
        given: dict[str, object] = {"RECIPE": recipe, "--set": settings, "--plan": plan, "--workers": workers}
        given |= {"--device": device, "--init": init, "--repeat": repeat, "--seed": seed, "--resume": resume}
        given |= {"--restarts": restarts}
        _replay_script(replay, out, [name for name, value in given.items() if value is not None])
    if plan is not None or workers is not None:
        start_fork_server()  # it imports torch while this process does
    if not quiet and "torch" not in sys.modules and is_first_rank():
        error_console().print("importing torch")
    from weft.engines.tolerance import check_restarts
    from weft.records.record_file import read_record
    from weft.runs.execute import execute
    from weft.runs.job import Job, choose_recipe, new_job, resumed_job
    from weft.runs.replay import compare_replay, replayed_job

    def make_job(num_started: int | None) -> Job:
        if replay is not None:
            fixed: dict[str, object] = {"RECIPE": recipe, "--set": settings, "--plan": plan, "--workers": workers}
            fixed |= {"--device": device, "--init": init, "--repeat": repeat, "--seed": seed, "--resume": resume}
            fixed |= {"--restarts": restarts}
            return replayed_job(replay, out, [name for name, value in fixed.items() if value is not None])
        if resume is not None:
            fixed = {
                "--set": settings,
                "--init": init,
                "--repeat": repeat,
                "--seed": seed,
                "--out": out,
                "--restarts": restarts,
            }
            given = [name for name, value in fixed.items() if value is not None]
            return resumed_job(resume, recipe, plan, workers, given, num_started, device=device)
        changes = [*(settings or []), *([] if init is None else [f"init={init.absolute()}"])]
        chosen = choose_recipe(recipe, changes, plan, workers, num_started, device=device)
        if restarts:
            check_restarts(chosen.mutable.plan, repeat or 1)
        return new_job(chosen, num_seeds=repeat or 1, first_seed=seed or 0, out=out)

    finished = execute(make_job, quiet=quiet, restarts=restarts or 0)
    if finished is None:  # another rank tells the result
        return
    if finished.folder.record_file.exists():
        record = read_record(finished.folder.path)
        _print_result(record, finished.folder.path, json=json)
    if finished.failure is not None:
        raise finished.failure
    if replay is not None:
        is_same, finding = compare_replay(replay, record)
        typer.echo(finding, err=True)
        raise typer.Exit(0 if is_same else 1)
    raise typer.Exit(0 if record.accepted else 1)


def _print_result(record: "RunRecord", path: Path, *, json: bool) -> None:
    from weft.cli.output import print_json, print_tables, record_document
    from weft.report.summary import render_run

    if json:
        print_json(record_document(record, path))
    else:
        print_tables(render_run(record))
        print(f"run folder: {path}")


def _replay_script(replay: Path, out: Path | None, given: list[str]) -> NoReturn:
    import tempfile

    from weft.engines.fork_server import start_fork_server
    from weft.errors import UsageError

    if given:
        raise UsageError(f"a replayed run keeps its settings ({', '.join(given)}); leave them out, or start a new run")
    start_fork_server()
    from weft.runs.script_run import replay_script

    with tempfile.TemporaryDirectory(prefix="weft-replay-") as scratch:
        is_same, finding = replay_script(replay, out or Path(scratch))
    typer.echo(finding, err=True)
    raise typer.Exit(0 if is_same else 1)
