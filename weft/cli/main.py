"""The `weft` command: its sub-commands, and the one place where errors become exit codes.

0 done and accepted | 1 done, but an acceptance rule failed | 2 wrong use | 3 training failed | 130 interrupted
"""

import io
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer

from weft.cli.cluster import cluster
from weft.cli.compare import compare
from weft.cli.doctor import doctor
from weft.cli.launch import launch
from weft.cli.list import list_all
from weft.cli.op import op
from weft.cli.profile import profile
from weft.cli.prove import prove
from weft.cli.run import run
from weft.cli.show import show
from weft.cli.simulate import simulate
from weft.console import error_console
from weft.errors import WeftError

__all__ = ["app", "main"]

BUG = "this is a bug in Weft, or in the recipe's own code; report it with the text above and `weft doctor --json`"

app = typer.Typer(
    name="weft",
    help="Train PyTorch models in parallel, and prove that the result is right.",
    epilog="Exit codes: 0 done and accepted, 1 an acceptance rule failed, 2 wrong use, 3 training failed, "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run")(run)
app.command("launch")(launch)
app.command("prove")(prove)
app.command("profile")(profile)
app.command("simulate")(simulate)
app.add_typer(cluster, name="cluster")
app.command("show")(show)
app.command("compare")(compare)
app.command("list")(list_all)
app.command("doctor")(doctor)
app.add_typer(op, name="op")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {metadata.version('weft')}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of any error; may stand anywhere in the line.")
    ] = False,
) -> None:
    """The help of `weft --help` for the options before the sub-command; `main` has taken `--debug` by then."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code; typer itself handles wrong options (2) and Ctrl-C (130)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a µ is no reason to fail
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app([argument for argument in given if argument != "--debug"], prog_name="weft")
    except WeftError as error:
        if debug:
            traceback.print_exc()
        error_console().print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        error_console().print(f"error: {BUG}", style="red", soft_wrap=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
