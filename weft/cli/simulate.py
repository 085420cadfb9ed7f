"""`weft simulate`: train on a virtual cluster, with real mathematics in virtual time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.options import Json, Plan, Settings

if TYPE_CHECKING:
    from weft.engines.simulation import Simulation

__all__ = ["simulate"]


def simulate(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in name or file.py:function.")],
    settings: Settings = None,
    plan: Plan = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "--workers", min=1, metavar="N", help="Short for --plan data=N.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `weft cluster probe` wrote; 10 Gbit/s Ethernet if not given."),
    ] = None,
    compute_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="X", help="Seconds of a rank's step; measured on this machine if not given."),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Train this often, a seed each.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="The first seed.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder to make; a new one in runs/ if not given.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    json: Json = False,
) -> None:
    """Train on virtual ranks in this process; times in the result are those that the cluster would take."""
    from weft.cli.console import error_console
    from weft.cli.job import choose_recipe, new_job
    from weft.cli.progress import use_progress
    from weft.distributed.group.virtual import TEN_GIGABIT
    from weft.engines.simulation import simulate as run_simulation
    from weft.planning.cluster import read_cluster
    from weft.planning.network import network_of

    network = TEN_GIGABIT if cluster is None else network_of(read_cluster(cluster))
    job = new_job(choose_recipe(recipe, settings or [], plan, ranks), num_seeds=repeat, first_seed=seed, out=out)
    with use_progress(error_console(), [f"seed {number}" for number in job.seeds], quiet=quiet) as listener:
        simulation = run_simulation(
            job.recipe,
            folder=job.folder,
            seeds=job.seeds,
            network=network,
            compute=compute_seconds,
            listeners=[listener],
        )
    _print_result(simulation, job.folder.path, json=json)
    raise typer.Exit(0 if simulation.record.accepted else 1)


def _print_result(simulation: "Simulation", path: Path, *, json: bool) -> None:
    from weft.cli.output import print_json, print_tables, record_document
    from weft.report import render_run
    from weft.report.table import aligned, section

    if json:
        costs = {"network": simulation.network, "compute": simulation.compute}
        print_json({**record_document(simulation.record, path), "simulation": _facts(simulation) | costs})
        return
    print_tables(render_run(simulation.record))
    rows = [(name.replace("_", " "), _format(value)) for name, value in _facts(simulation).items()]
    print_tables(section("simulated; times above are virtual", aligned("lr", rows)))
    print(f"run folder: {path}")


def _format(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _facts(simulation: "Simulation") -> dict[str, Any]:
    return {
        "ranks": simulation.num_ranks,
        "virtual_seconds": simulation.virtual_seconds,
        "bytes_sent": simulation.num_bytes,
        "messages": simulation.num_messages,
        "events": simulation.num_events,
        "events_per_second": simulation.events_per_second,
        "real_seconds": simulation.real_seconds,
    }
