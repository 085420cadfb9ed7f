"""`weft prove`: show that a plan computes what one rank computes."""

from typing import Annotated

import typer

from weft.cli.options import Json, Plan, Settings, Workers

__all__ = ["prove"]


def prove(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in name or file.py:function.")],
    plan: Plan = None,
    workers: Workers = None,
    settings: Settings = None,
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="Steps to compare.")] = 5,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="The seed.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="T", help="Largest error, as a share of a tensor's largest value.")
    ] = 1e-5,
    json: Json = False,
) -> None:
    """Train the same global batches on the plan's ranks and on one, and compare the parameters after each step."""
    from weft.cli.job import with_plan, with_settings
    from weft.cli.output import print_json
    from weft.engines.proving import prove as prove_plan
    from weft.recipes import find_recipe

    chosen = with_plan(with_settings(find_recipe(recipe), settings or []), plan, workers)
    proof = prove_plan(chosen, seed=seed, num_steps=steps, tolerance=tolerance)
    if json:
        print_json({"recipe": chosen.name, "plan": chosen.mutable.plan, "proof": proof})
    else:
        typer.echo(f"{'PASS' if proof.passed else 'FAIL'}  {chosen.name}  {chosen.mutable.plan}\n      {proof.finding}")
    raise typer.Exit(0 if proof.passed else 1)
