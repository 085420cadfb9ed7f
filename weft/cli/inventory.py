"""Tables of what is here and what is missing: recipes, data sets, and the parts of the machine."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Group
from rich.text import Text

from weft.engines.environment import Check, is_fit
from weft.report.table import Prose, aligned, note, section
from weft.training.datasets import Availability

__all__ = ["render_checks", "render_inventory"]

STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def render_inventory(recipes: Mapping[str, str], datasets: Sequence[Availability], extras: Sequence[Check]) -> Group:
    return Group(
        Prose("recipes", list(recipes.items())),
        section("data sets", aligned("lll", map(_dataset_cells, datasets))),
        section("extras", aligned("lll", map(_check_cells, extras))),
        note("train one: weft run RECIPE"),
    )


def render_checks(checks: Sequence[Check]) -> Group:
    parts = [
        section(name, aligned("lll", map(_check_cells, members)))
        for name, members in groupby(checks, key=lambda check: check.section)
    ]
    return Group(*parts, _conclusion(checks))


def _conclusion(checks: Sequence[Check]) -> Text:
    if not is_fit(checks):
        ill = [check.name for check in checks if check.required and check.status != "ok"]
        return Text(f"Weft cannot run here before this is cured: {', '.join(ill)}", "red")
    absent = sum(check.status != "ok" for check in checks)
    return Text(f"all that Weft needs works here; optional parts that do not: {absent}")


def _check_cells(check: Check) -> tuple[str, Text, str]:
    explained = f"{check.detail}; {check.cure}" if check.cure else check.detail
    return check.name, Text(check.status, STYLES[check.status]), explained


def _dataset_cells(dataset: Availability) -> tuple[str, Text, str]:
    found = Text("found", "green") if dataset.found else Text("missing", "yellow")
    return dataset.name, found, dataset.where if dataset.found else dataset.cure
