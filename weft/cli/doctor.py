"""`weft doctor`: what works on this machine, each thing with its cure when it does not."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

import typer
from rich.console import Group
from rich.text import Text

from weft.cli.console import output_console, print_json
from weft.cli.options import Json
from weft.engines.environment import Check, check_environment
from weft.report.table import make_table, section

__all__ = ["check_rows", "doctor"]

STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def doctor(json: Json = False) -> None:
    """Say what works on this machine, and the cure for what does not."""
    checks = check_environment()
    if json:
        print_json([asdict(check) for check in checks])
    else:
        output_console().print(render_checks(checks))
    raise typer.Exit(0 if all(check.status == "ok" for check in checks if check.required) else 1)


def render_checks(checks: Sequence[Check]) -> Group:
    columns = (("", "left"), ("", "left"), ("", "left"))
    parts = [
        section(name, make_table(columns, check_rows(list(members))))
        for name, members in groupby(checks, key=lambda check: check.section)
    ]
    return Group(*parts, verdict(checks))


def check_rows(checks: Sequence[Check]) -> list[tuple[str, Text, Text]]:
    return [(check.name, Text(check.status, STYLES[check.status]), _explain(check)) for check in checks]


def verdict(checks: Sequence[Check]) -> Text:
    ill = [check.name for check in checks if check.required and check.status != "ok"]
    if ill:
        return Text(f"Weft cannot run here before this is cured: {', '.join(ill)}", "red")
    absent = sum(check.status != "ok" for check in checks)
    return Text(f"all that Weft needs works here; optional parts that do not: {absent}")


def _explain(check: Check) -> Text:
    text = Text(check.detail)
    return text.append(f"\ncure: {check.cure}", "dim") if check.cure else text
