"""The command line is frozen: what users type in scripts changes only together with this table and the changelog."""

from typing import Annotated

import pytest
import typer

from weft.cli.main import app

# Sub-command -> its arguments in order, then its options; "" holds the options before any sub-command.
OPTIONS = {
    "": ["--debug", "--version"],
    "compare": ["RUN_A", "RUN_B", "--force", "--json"],
    "doctor": ["--json"],
    "list": ["--json"],
    "run": ["RECIPE", "--json", "--out", "--quiet", "--repeat", "--resume", "--seed", "--set", "-q"],
    "show": ["RUN", "--json"],
}


def options_of(application: typer.Typer) -> dict[str, list[str]]:
    """What each sub-command takes, in the form of the table."""
    group = typer.main.get_command(application)
    commands = {"": group, **getattr(group, "commands", {})}
    return {name: _spell(command.params) for name, command in sorted(commands.items())}


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


@pytest.mark.parametrize("changed", [small_app(command_name="run"), small_app(option="--quick")])
def test_a_renamed_command_or_option_is_seen(changed: typer.Typer) -> None:
    assert options_of(changed) != options_of(small_app())
