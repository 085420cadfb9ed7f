"""`weft prove`: show that a plan computes what one rank computes, or an executor what another does."""

from typing import Annotated, Any, NoReturn

import typer

from weft.cli.options import (
    Device,
    Json,
    Plan,
    RecipeOrScript,
    ScriptArguments,
    Settings,
    Workers,
    check_no_arguments,
    is_script,
    refuse_options,
)

__all__ = ["prove"]


def prove(
    recipe: RecipeOrScript,
    arguments: ScriptArguments = None,
    plan: Plan = None,
    workers: Workers = None,
    device: Device = None,
    executor: Annotated[
        list[str] | None,
        typer.Option(metavar="E", help="Compare this executor with eager mode; given twice, the two."),
    ] = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="Steps to compare.")] = 5,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="The seed.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="T",
            help="Largest error, as a share of a tensor's largest value. "
            "[default: 1e-5, in float64 1e-10; of executors, by the pair; of scripts, 1e-4]",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=0, metavar="N", help="Trainings that judge a relaxed plan's convergence; 0 for none.")
    ] = 5,
    margin: Annotated[
        float, typer.Option(min=0.0, metavar="M", help="A relaxed plan may need up to 1 + M times the samples.")
    ] = 0.5,
    float64: Annotated[
        bool, typer.Option("--float64", help="Compute in float64, to 1e-10, where errors are no rounding.")
    ] = False,
    json: Json = False,
) -> None:
    """Train the same global batches on the plan's ranks and on one, and compare the parameters after each step. Of a
    relaxed plan, compare each rank with the equations, and samples to target with those of one rank. With --executor,
    train them with two executors, and compare losses, gradients and parameters. Of a script, run the first steps in one
    process and on the ranks, and say why they differ if they do."""
    from weft.engines.fork_server import start_fork_server

    if plan is not None or workers is not None or is_script(recipe):
        start_fork_server()  # it imports torch while this process does
    if is_script(recipe):
        refuse_options("prove", {"--device": device, "--executor": executor, "--set": settings, "--float64": float64})
        _prove_script(recipe, arguments or [], plan, workers, steps, seed, tolerance, json=json)
    check_no_arguments(recipe, arguments)
    from weft.cli.output import print_json
    from weft.errors import UsageError
    from weft.proving import check_convergence, check_target, prove_executors
    from weft.proving import prove as prove_plan
    from weft.recipes import find_recipe
    from weft.runs.job import with_device, with_plan, with_settings

    chosen = with_device(with_plan(with_settings(find_recipe(recipe), settings or []), plan, workers), device)
    shown: dict[str, Any]
    is_relaxed = not executor and not chosen.mutable.plan.is_synchronous
    if is_relaxed and seeds:
        check_target(chosen, seeds)
    if executor:
        refuse_options("prove --executor", {"--float64": float64})
        if len(executor) > 2:
            raise UsageError(f"two executors can be compared ({', '.join(executor)}); give one or two")
        pair = (executor[0], executor[1] if len(executor) == 2 else "eager")
        proof: Any = prove_executors(chosen, *pair, seed=seed, num_steps=steps, tolerance=tolerance)
        shown = {"executors": pair}
    else:
        limit = (1e-10 if float64 else 1e-5) if tolerance is None else tolerance
        proof = prove_plan(chosen, seed=seed, num_steps=steps, tolerance=limit, in_float64=float64)
        shown = {"plan": str(chosen.mutable.plan)}
    passed = proof.passed
    if is_relaxed and seeds and passed:
        convergence = check_convergence(chosen, seeds=range(seed, seed + seeds), margin=margin)
        passed, shown["convergence"] = convergence.passed, convergence
    if json:
        print_json({"recipe": chosen.name, **shown, "proof": proof})
    else:
        what = " against ".join(shown["executors"]) if executor else shown["plan"]
        findings = [proof.finding, *([shown["convergence"].finding] if "convergence" in shown else [])]
        typer.echo("\n      ".join([f"{'PASS' if passed else 'FAIL'}  {chosen.name}  {what}", *findings]))
    raise typer.Exit(0 if passed else 1)


def _prove_script(
    path: str,
    arguments: list[str],
    plan: str | None,
    workers: int | None,
    steps: int,
    seed: int,
    tolerance: float | None,
    *,
    json: bool,
) -> NoReturn:
    from weft.cli.output import print_json
    from weft.distributed.script.observation.tracing import TraceRequest
    from weft.engines.local import threads_per_rank
    from weft.proving.script_proof import check_provable, prove_script
    from weft.runs.script import NUM_RANKS, Script, choose_plan, launch_script

    script, chosen = Script(path, arguments=tuple(arguments)), choose_plan(plan, workers)
    script.check()
    if chosen is not None:
        check_provable(chosen)
    num_ranks = workers or (chosen.num_ranks if chosen else NUM_RANKS)
    threads = {"OMP_NUM_THREADS": str(threads_per_rank(num_ranks))}

    def run(request: TraceRequest, number: int) -> None:
        launch_script(script, number, chosen if number > 1 else None, environment={**threads, **request.variables})

    proof = prove_script(run, num_ranks, num_steps=steps, seed=seed, tolerance=1e-4 if tolerance is None else tolerance)
    what = str(chosen) if chosen else f"{num_ranks} ranks"
    if json:
        print_json({"script": path, "plan": what, "proof": proof})
    else:
        findings = [proof.finding, *(f"cause: {cause}" for cause in proof.causes)]
        if not proof.passed and not proof.causes:
            findings.append("no known cause fits (summed loss, tokens, batch norm, random numbers, unshared batches)")
        typer.echo("\n      ".join([f"{'PASS' if proof.passed else 'FAIL'}  {path}  {what}", *findings]))
    raise typer.Exit(0 if proof.passed else 1)
