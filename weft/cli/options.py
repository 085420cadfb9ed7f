"""Options that several sub-commands share.

A recipe is a built-in name or file.py:function; a script is a file.py. Options of Weft may stand before and after it;
what is the script's own comes after `--`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from weft.errors import UsageError

__all__ = [
    "Device",
    "Json",
    "Out",
    "Plan",
    "Quiet",
    "RecipeOrScript",
    "RecipeOrScriptIfAny",
    "Repeat",
    "Replay",
    "ScriptArguments",
    "Seed",
    "Settings",
    "Workers",
    "check_no_arguments",
    "is_script",
    "refuse_options",
]

RECIPE_OR_SCRIPT = typer.Argument(metavar="RECIPE", help="A built-in name or file.py:function; or a script, file.py.")
RecipeOrScript = Annotated[str, RECIPE_OR_SCRIPT]
RecipeOrScriptIfAny = Annotated[str | None, RECIPE_OR_SCRIPT]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENT]...", help="Of a script, what it gets.")
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, as in optimizer.lr=0.01.")
]
Plan = Annotated[
    str | None, typer.Option(metavar="PLAN", help='How to parallelise, as in "data=2 topology=server(2)".')
]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --plan data=N.")]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="auto (the accelerator, if there is one), cpu, cuda, cuda:1, ... [default: the recipe's]",
    ),
]
Repeat = Annotated[int | None, typer.Option(min=1, metavar="N", help="Train this often, a seed each; 1 if not given.")]
Seed = Annotated[int | None, typer.Option(min=0, metavar="S", help="The first seed; 0 if not given.")]
Init = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Begin with these weights: a .safetensors file, or a folder with such."),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run folder to make; a new one in runs/ if not given.")
]
Replay = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="Repeat the run in this folder, in the order it had, bit for bit."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def is_script(name: str | None) -> bool:
    """Whether a word of a command line is a script and no recipe.

    >>> is_script("train.py"), is_script("recipes.py:tiny"), is_script("digits_mlp")
    (True, False, False)
    """
    return name is not None and name.endswith(".py")


def check_no_arguments(recipe: str | None, arguments: list[str] | None) -> None:
    if arguments:
        raise UsageError(f"a recipe takes no arguments ({recipe}: {' '.join(arguments)}); change it with --set")


def refuse_options(command: str, given: Mapping[str, object]) -> None:
    """Raise where options were given that a script has no use for."""
    names = [name for name, value in given.items() if value]
    if names:
        raise UsageError(f"weft {command} has no such option for a script ({', '.join(names)}); leave it out")
