"""`weft launch`: run a script of one's own on several ranks of this machine."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["launch", "split_launch"]

MODULE = "-m"


def split_launch(words: Sequence[str], with_value: Collection[str]) -> tuple[list[str], list[str]]:
    """A command line after `launch` in two: the launch's own words, and the script's, which are all from its name on.

    Args:
        with_value: the options of the launch that take the next word, as `--workers 2`.

    >>> split_launch(["--workers", "2", "train.py", "--workers", "1"], ["--workers"])
    (['--workers', '2'], ['train.py', '--workers', '1'])
    >>> split_launch(["-m", "package.train", "--lr", "0.1"], ["-m"])
    (['-m', 'package.train'], ['--lr', '0.1'])
    """
    own, rest = list[str](), list(words)
    while rest and rest[0].startswith("-"):
        if rest[0] == "--":
            return own, rest[1:]
        option, length = rest[0], 2 if rest[0] in with_value else 1
        own, rest = own + rest[:length], rest[length:]
        if option.startswith(MODULE):
            break
    return own, rest


def launch(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGUMENT]...", help="A Python file, and all that it gets, whatever it looks like."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Ranks to start; 2 if not given.")] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            envvar="WEFT_PLAN",
            help='How to parallelise, in place of what the script says, as in "data=2 consistency=local(8)".',
        ),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(MODULE, metavar="MODULE", help="Run a module as python -m does; what follows is its own."),
    ] = None,
    output: Annotated[
        Literal["first", "all"],
        typer.Option(help="Show what rank 0 prints, or every line of all ranks behind its rank."),
    ] = "first",
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep there what each rank prints, one file a rank.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record the run there; `weft run --replay DIR` repeats it.")
    ] = None,
) -> None:
    """Run a script on several ranks. What follows the script is the script's own."""
    from weft.engines.fork_server import start_fork_server
    from weft.errors import UsageError
    from weft.runs.script import NUM_RANKS, Script, choose_plan, launch_script

    given = words or []
    if module is None and not given:
        raise UsageError("no script was given; name a Python file, or a module with -m")
    script = Script(module=module, arguments=tuple(given)) if module else Script(given[0], "", tuple(given[1:]))
    script.check()
    start_fork_server()
    chosen, variables = choose_plan(plan, workers), {}
    if out is not None:
        from weft.runs.script_run import create_script_run

        num_ranks = chosen.num_ranks if chosen else workers or NUM_RANKS
        variables = create_script_run(out, script, num_ranks, chosen).variables(out)
    launch_script(script, workers, chosen, environment=variables, shows=output, logs=logs)
