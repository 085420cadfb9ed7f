"""`weft doctor`: what works on this machine, each thing with its cure when it does not."""

import typer

from weft.cli.options import Json

__all__ = ["doctor"]


def doctor(json: Json = False) -> None:
    """Say what works here, and the cure for the rest."""
    from weft.cli.inventory import render_checks
    from weft.cli.output import print_json, print_tables
    from weft.engines.environment import check_environment, is_fit

    checks = check_environment()
    if json:
        print_json(checks)
    else:
        print_tables(render_checks(checks))
    raise typer.Exit(0 if is_fit(checks) else 1)
