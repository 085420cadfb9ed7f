"""`weft simulate`: train on a virtual cluster, with real mathematics in virtual time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from weft.cli.options import (
    Json,
    Out,
    Plan,
    Quiet,
    RecipeOrScriptIfAny,
    Repeat,
    Replay,
    ScriptArguments,
    Seed,
    Settings,
    check_no_arguments,
    is_script,
    refuse_options,
)

if TYPE_CHECKING:
    from weft.planning.network import NetworkModel
    from weft.simulation.script import ScriptSimulation
    from weft.simulation.simulation import Simulation

__all__ = ["simulate"]


def simulate(
    recipe: RecipeOrScriptIfAny = None,
    arguments: ScriptArguments = None,
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
    stragglers: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Who is slow: '1 in 20 steps 5x slower', 'rank 3 2x slower'."),
    ] = None,
    fail: Annotated[str | None, typer.Option(metavar="TEXT", help="Who dies: 'rank 3 at 40 s'.")] = None,
    repeat: Repeat = None,
    seed: Seed = None,
    out: Out = None,
    replay: Replay = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train on virtual ranks in this process; times in the result are those that the cluster would take. A script runs
    unchanged."""
    if replay is not None and (replay / "script.json").is_file():
        fixed: dict[str, object] = {"RECIPE": recipe, "--set": settings, "--plan": plan, "--ranks": ranks}
        refuse_options("simulate --replay", fixed | {"--repeat": repeat, "--seed": seed, "--out": out})
        _replay_script(replay, cluster, compute_seconds, json=json)
    if is_script(recipe):
        unused = {"--set": settings, "--repeat": repeat, "--seed": seed, "--out": out, "--replay": replay}
        refuse_options("simulate", unused)
        _simulate_script(
            Path(str(recipe)), arguments or [], plan, ranks, cluster, compute_seconds, stragglers, fail, json=json
        )
        return
    check_no_arguments(recipe, arguments)
    from weft.console import error_console
    from weft.runs.job import choose_recipe, new_job
    from weft.runs.progress import use_progress
    from weft.runs.replay import compare_replay, replayed_job
    from weft.simulation.simulation import simulate as run_simulation
    from weft.simulation.stragglers import check_ranks, parse_failures, parse_stragglers

    network = _network_of(cluster)
    if replay is not None:
        fixed = {"RECIPE": recipe, "--set": settings, "--plan": plan, "--ranks": ranks, "--repeat": repeat}
        fixed |= {"--seed": seed}
        replayed = replayed_job(replay, out, [name for name, value in fixed.items() if value is not None])
    chosen = replayed.recipe if replay is not None else choose_recipe(recipe, settings or [], plan, ranks)
    num_ranks = chosen.mutable.plan.num_ranks
    slow = parse_stragglers(stragglers) if stragglers else ()
    check_ranks(slow, num_ranks)
    faults = parse_failures(fail, num_ranks) if fail else ()
    job = replayed if replay is not None else new_job(chosen, num_seeds=repeat or 1, first_seed=seed or 0, out=out)
    with use_progress(error_console(), [f"seed {number}" for number in job.seeds], quiet=quiet) as listener:
        simulation = run_simulation(
            job.recipe,
            folder=job.folder,
            seeds=job.seeds,
            network=network,
            compute=compute_seconds,
            stragglers=slow,
            faults=faults,
            listeners=[listener],
            replay=replay,
        )
    _print_result(simulation, job.folder.path, json=json)
    if replay is not None:
        is_same, finding = compare_replay(replay, simulation.record)
        typer.echo(finding, err=True)
        raise typer.Exit(0 if is_same else 1)
    raise typer.Exit(0 if simulation.record.accepted else 1)


def _simulate_script(
    path: Path,
    arguments: list[str],
    plan: str | None,
    ranks: int | None,
    cluster: Path | None,
    compute_seconds: float | None,
    stragglers: str | None,
    fail: str | None,
    *,
    json: bool,
) -> None:
    from weft.runs.script import NUM_RANKS, Script, choose_plan
    from weft.simulation.script import simulate_script
    from weft.simulation.stragglers import parse_failures, parse_stragglers

    Script(str(path)).check()
    chosen = choose_plan(plan, ranks)
    num_ranks = chosen.num_ranks if chosen else ranks or NUM_RANKS
    simulation = simulate_script(
        path,
        arguments,
        num_ranks=num_ranks,
        plan=chosen,
        network=_network_of(cluster),
        compute=compute_seconds,
        stragglers=parse_stragglers(stragglers) if stragglers else (),
        faults=parse_failures(fail, num_ranks) if fail else (),
    )
    _print_script(simulation, path, json=json)


def _replay_script(replay: Path, cluster: Path | None, compute_seconds: float | None, *, json: bool) -> NoReturn:
    from weft.runs.script import choose_plan
    from weft.runs.script_run import compare_ends, open_script_run
    from weft.simulation.script import simulate_script

    run = open_script_run(replay)
    simulation = simulate_script(
        Path(run.script.path),
        run.script.arguments,
        num_ranks=run.num_ranks,
        plan=choose_plan(run.plan, run.num_ranks),
        network=_network_of(cluster),
        compute=compute_seconds,
        seed=run.seed,
        replay=replay,
    )
    _print_script(simulation, Path(run.script.path), json=json)
    is_same, finding = compare_ends(replay, simulation.digests)
    typer.echo(finding, err=True)
    raise typer.Exit(0 if is_same else 1)


def _network_of(cluster: Path | None) -> "NetworkModel":
    from weft.distributed.virtual import TEN_GIGABIT
    from weft.planning.cluster import read_cluster
    from weft.planning.network import network_of

    return TEN_GIGABIT if cluster is None else network_of(read_cluster(cluster))


def _print_script(simulation: "ScriptSimulation", path: Path, *, json: bool) -> None:
    from weft.cli.output import print_json, print_tables
    from weft.console import error_console
    from weft.report.table import aligned, section

    facts = {
        "ranks": simulation.num_ranks,
        "steps": simulation.num_steps,
        "virtual_seconds": simulation.virtual_seconds,
        "step_seconds": simulation.step_seconds,
        "compute_seconds": simulation.compute_seconds,
        "exposed_seconds": simulation.exposed_seconds,
        "hidden_seconds": simulation.hidden_seconds,
        "waiting_share": simulation.waiting_share,
        "bytes_sent": simulation.num_bytes,
        "messages": simulation.num_messages,
        "events": simulation.num_events,
    }
    if json:
        costs = {"network": simulation.network, "compute": simulation.compute, "digests": simulation.digests}
        print_json({"script": str(path), "plan": simulation.plan, "simulation": facts | costs})
    else:
        rows = [(name.replace("_", " "), _format(value)) for name, value in facts.items()]
        print_tables(section(f"simulated: {path}  {simulation.plan}; times are virtual", aligned("lr", rows)))
    # Not with the result, which is the same every time.
    error_console().print(f"simulated in {simulation.real_seconds:.3g} s")


def _print_result(simulation: "Simulation", path: Path, *, json: bool) -> None:
    from weft.cli.output import print_json, print_tables, record_document
    from weft.report.summary import render_run
    from weft.report.table import aligned, section

    if json:
        costs = {"network": simulation.network, "compute": simulation.compute}
        facts = _facts(simulation) | {"idle_shares": simulation.idle_shares} | costs
        print_json({**record_document(simulation.record, path), "simulation": facts})
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
