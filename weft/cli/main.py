"""The `weft` command: its sub-commands, and the one place where errors become exit codes.

0 done and accepted | 1 done, but an acceptance rule failed | 2 wrong use | 3 training failed | 130 interrupted
"""

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from weft.cli.cluster import cluster
from weft.cli.compare import compare
from weft.cli.doctor import doctor
from weft.cli.export import export
from weft.cli.launch import launch, split_launch
from weft.cli.list import list_all
from weft.cli.op import op
from weft.cli.profile import profile
from weft.cli.prove import prove
from weft.cli.run import run
from weft.cli.schedule import schedule
from weft.cli.show import show
from weft.cli.signals import use_orderly_end
from weft.cli.simulate import simulate
from weft.console import error_console
from weft.errors import RankFailedError, WeftError

__all__ = ["app", "main"]

BUG = "this is a bug in Weft, or in the recipe's own code; report it with the text above and `weft doctor --json`"
REJECTED = "the run ended well, but an acceptance rule failed; the table above says which"

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
app.command("schedule")(schedule)
app.command("show")(show)
app.command("compare")(compare)
app.command("export")(export)
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
        bool, typer.Option("--debug", help="Show the traceback of any error; may stand anywhere before a script.")
    ] = False,
) -> None:
    """The help of `weft --help` for the options before the sub-command; `main` has taken `--debug` by then."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code; typer itself handles wrong options (2) and Ctrl-C (130)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a µ is no reason to fail
    own, others = _split(list(sys.argv[1:] if arguments is None else arguments))
    debug = "--debug" in own
    try:
        with use_orderly_end():
            app([*(word for word in own if word != "--debug"), *others], prog_name="weft")
    except WeftError as error:
        _show(error, debug=debug)
        _leave(f"error: {error}", error.exit_code)
    except SystemExit as left:
        interrupt = _find_interrupt(left)
        if interrupt is not None:
            error_console().print(str(interrupt) or "interrupted", soft_wrap=True)
        elif left.code == 1:
            _tell_torchrun(REJECTED)
        raise
    except Exception:
        traceback.print_exc()
        _leave(f"error: {BUG}", 3)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words that are the command's own, and those of a script that it is to start."""
    position = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    if position is None or words[position] != "launch":
        return words, []
    parameters = typer.main.get_command(app).commands["launch"].params  # type: ignore[attr-defined]
    with_value = {spelling for p in parameters if not getattr(p, "is_flag", False) for spelling in p.opts}
    own, scripts = split_launch(words[position + 1 :], with_value)
    return words[: position + 1] + own, ["--", *scripts]


def _show(error: WeftError, *, debug: bool) -> None:
    """Show where an error came from, before the error itself."""
    ranks = error if isinstance(error, RankFailedError) else None
    text = (ranks.rank_traceback if ranks else "") or traceback.format_exc() if debug else ranks.shown if ranks else ""
    sys.stderr.write(text)


def _leave(text: str, code: int) -> NoReturn:
    error_console().print(text, style="red", soft_wrap=True)
    _tell_torchrun(text)
    sys.exit(code)


def _find_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that led to an error, if one did."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _tell_torchrun(text: str) -> None:
    """torchrun takes any exit code but 0 for a crash and shows its own stack; and what it finds in this file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps({"message": message}))


if __name__ == "__main__":
    main()
