"""The command line is frozen: what users type in scripts changes only together with this table and the changelog."""

from typing import Annotated, Any

import pytest
import typer

from weft.cli.main import app

# Sub-command -> its arguments in order, then its options; "" holds the options before any sub-command.
OPTIONS = {
    "": ["--debug", "--version"],
    "cluster": [],
    "cluster probe": ["--json", "--out", "--workers"],
    "compare": ["RUN_A", "RUN_B", "--force", "--json"],
    "doctor": ["--json"],
    "export": ["RUN", "--out", "--part", "--seed"],
    "launch": [
        *("WORDS", "--host-rank", "--logs", "--num-hosts", "--out", "--output", "--plan", "--rendezvous"),
        *("--secret-file", "--timeout", "--workers", "-m"),
    ],
    "list": ["--json"],
    "op": [],
    "op bench": ["FILE", "--json", "--seconds", "--threads"],
    "op check": ["FILE", "--json", "--seed"],
    "profile": [
        *("RECIPE", "ARGUMENTS"),
        *("--json", "--plan", "--seed", "--set", "--steps", "--threads", "--top", "--workers"),
    ],
    "prove": [
        *("RECIPE", "ARGUMENTS"),
        *(
            "--device",
            "--executor",
            "--float64",
            "--json",
            "--margin",
            "--plan",
            "--seed",
            "--seeds",
            "--set",
            "--steps",
        ),
        *("--tolerance", "--workers"),
    ],
    "run": [
        "RECIPE",
        *("--device", "--init", "--json", "--out", "--plan", "--quiet", "--repeat", "--replay", "--restarts"),
        *("--resume", "--seed", "--set", "--workers", "-q"),
    ],
    "schedule": ["PLAN", "--json"],
    "show": ["RUN", "--json"],
    "simulate": [
        *("RECIPE", "ARGUMENTS"),
        *("--cluster", "--compute-seconds", "--fail", "--json", "--out", "--plan", "--quiet", "--ranks", "--repeat"),
        *("--replay", "--seed", "--set", "--stragglers", "--workers", "-q"),
    ],
}


def options_of(application: typer.Typer) -> dict[str, list[str]]:
    """What each sub-command takes, in the form of the table."""
    commands = _commands_of("", typer.main.get_command(application))
    return {name: _spell(command.params) for name, command in sorted(commands.items())}


def _commands_of(name: str, command: Any) -> dict[str, Any]:
    """The command and all below it, by the words that call them."""
    below = getattr(command, "commands", {}).items()
    return {name: command} | {
        k: v for word, sub in below for k, v in _commands_of(f"{name} {word}".strip(), sub).items()
    }


def _spell(parameters: list[typer.core.TyperOption | typer.core.TyperArgument]) -> list[str]:
    arguments = [p.name.upper() for p in parameters if isinstance(p, typer.core.TyperArgument) and p.name]
    options = [[*p.opts, *p.secondary_opts] for p in parameters if isinstance(p, typer.core.TyperOption)]
    return arguments + sorted(spelling for spellings in options for spelling in spellings)


def test_the_command_line_is_that_of_the_table() -> None:
    assert options_of(app) == OPTIONS


def small_app(command_name: str = "walk", option: str = "--fast/--slow") -> typer.Typer:
    application = typer.Typer(add_completion=False)

    @application.callback()
    def before(loud: Annotated[bool, typer.Option("--loud")] = False) -> None: ...

    @application.command(command_name)
    def command(place: str, fast: Annotated[bool, typer.Option(option)] = False) -> None: ...

    return application


def test_arguments_and_all_spellings_are_seen() -> None:
    assert options_of(small_app()) == {"": ["--loud"], "walk": ["PLACE", "--fast", "--slow"]}


def test_commands_below_a_command_are_seen() -> None:
    application = typer.Typer(add_completion=False)
    application.add_typer(small_app(), name="go")
    assert options_of(application) == {"": [], "go": ["--loud"], "go walk": ["PLACE", "--fast", "--slow"]}


@pytest.mark.parametrize("changed", [small_app(command_name="run"), small_app(option="--quick")])
def test_a_renamed_command_or_option_is_seen(changed: typer.Typer) -> None:
    assert options_of(changed) != options_of(small_app())
