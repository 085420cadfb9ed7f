"""`weft launch`: run a script of one's own on several ranks, of this machine or of several."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from weft.engines.hosts import Rendezvous
    from weft.specs import Plan

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
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS:PORT", help="Where several hosts meet: an address of host 0, and a free port."),
    ] = None,
    host_rank: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Which of the hosts this one is, from 0.")
    ] = None,
    num_hosts: Annotated[int | None, typer.Option(min=2, metavar="N", help="Hosts that share the ranks.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Seconds in which all hosts must come; 300 if not given.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The secret by which servers on several hosts know their peers."),
    ] = None,
) -> None:
    """Run a script on several ranks. What follows the script is the script's own. On several hosts, give the same
    command on each, with its own --host-rank."""
    from weft.engines.fork_server import start_fork_server
    from weft.errors import UsageError
    from weft.runs.script import NUM_RANKS, Script, choose_plan, launch_script

    given = words or []
    if module is None and not given:
        raise UsageError("no script was given; name a Python file, or a module with -m")
    script = Script(module=module, arguments=tuple(given)) if module else Script(given[0], "", tuple(given[1:]))
    script.check()
    meeting = _find_meeting(rendezvous, host_rank, num_hosts, timeout, secret_file, out)
    start_fork_server()
    chosen, variables = choose_plan(plan, workers, num_hosts or NUM_RANKS), {}
    if meeting is not None:
        variables = _find_secret_for(chosen, secret_file)
    if out is not None:
        from weft.runs.script_run import create_script_run

        num_ranks = chosen.num_ranks if chosen else workers or NUM_RANKS
        variables = create_script_run(out, script, num_ranks, chosen).variables(out)
    num_workers = workers or num_hosts
    launch_script(script, num_workers, chosen, environment=variables, shows=output, logs=logs, rendezvous=meeting)


def _find_meeting(
    rendezvous: str | None,
    host_rank: int | None,
    num_hosts: int | None,
    timeout: float | None,
    secret_file: Path | None,
    out: Path | None,
) -> "Rendezvous | None":
    from weft.engines.hosts import Rendezvous
    from weft.errors import UsageError

    if rendezvous is None:
        options = {"--host-rank": host_rank, "--num-hosts": num_hosts, "--timeout": timeout}
        for name, value in {**options, "--secret-file": secret_file}.items():
            if value is not None:
                raise UsageError(f"{name} is for several hosts; give --rendezvous ADDRESS:PORT too")
        return None
    if host_rank is None or num_hosts is None:
        raise UsageError("hosts that meet are numbered; give --host-rank and --num-hosts too")
    if out is not None:
        raise UsageError(f"a run on several hosts is not recorded (--out: {out}); start it without --out")
    return Rendezvous.parse(rendezvous, host_rank, num_hosts, *(() if timeout is None else (timeout,)))


def _find_secret_for(plan: "Plan | None", secret_file: Path | None) -> dict[str, str]:
    """The variables that hand the secret to ranks. No launcher makes it: hosts have nothing in common but what their
    user gives to each."""
    from weft.errors import UsageError
    from weft.secret import SECRET_VARIABLE, find_secret, read_secret

    if secret_file is not None:
        return {SECRET_VARIABLE: read_secret(secret_file).hex()}
    if plan is not None and plan.roles.num_addresses > plan.roles.num_workers:
        if SECRET_VARIABLE not in os.environ:
            cure = f"give --secret-file, or set {SECRET_VARIABLE}, the same on each host (openssl rand -hex 32)"
            raise UsageError(f"servers between hosts need a secret by which they know their peers ({plan}); {cure}")
        find_secret()
    return {}
