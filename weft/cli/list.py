"""`weft list`: the recipes, the data sets and the extras, each with how to get what is not here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from weft.cli.console import output_console, print_json
from weft.cli.doctor import check_rows
from weft.cli.options import Json
from weft.engines.environment import Check, check_extras
from weft.report.table import make_table, section

if TYPE_CHECKING:
    from weft.training.datasets import Availability

__all__ = ["list_all"]


def list_all(json: Json = False) -> None:
    """List the recipes, the data sets and the extras."""
    from weft.recipes import BUILT_IN
    from weft.training.datasets import DATASETS, locate

    recipes = {name: make().description for name, make in BUILT_IN.items()}
    datasets = [locate(name) for name in DATASETS]
    extras = check_extras()
    if json:
        print_json({"recipes": recipes, "datasets": list(map(asdict, datasets)), "extras": list(map(asdict, extras))})
    else:
        output_console().print(render_lists(recipes, datasets, extras))


def render_lists(recipes: Mapping[str, str], datasets: Sequence["Availability"], extras: Sequence[Check]) -> Group:
    two, three = (("", "left"), ("", "left")), (("", "left"), ("", "left"), ("", "left"))
    return Group(
        section("recipes", make_table(two, recipes.items())),
        section("data sets", make_table(three, map(_dataset_row, datasets))),
        section("extras", make_table(three, check_rows(extras))),
        Text("train one of them: weft run <recipe>", "dim"),
    )


def _dataset_row(found: "Availability") -> tuple[str, Text, Text]:
    if found.found:
        return found.name, Text("found", "green"), Text(found.where)
    return found.name, Text("missing", "yellow"), Text(f"cure: {found.cure}", "dim")
