"""`weft profile`: where the time of a training step goes, operator by operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import (
    Json,
    Plan,
    RecipeOrScript,
    ScriptArguments,
    Settings,
    check_no_arguments,
    is_script,
    refuse_options,
)
from weft.errors import UsageError
from weft.report.quantity import format_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from weft.graph import KindProfile, OperatorProfile, Profile
    from weft.operators.bench import Placement
    from weft.operators.cost import Cost
    from weft.operators.roofline import Roofline
    from weft.runs.script_profile import ScriptProfile

__all__ = ["profile"]


def profile(
    recipe: RecipeOrScript,
    arguments: ScriptArguments = None,
    settings: Settings = None,
    plan: Plan = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of a script, ranks; 1 if not given.")] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="Steps to time.")] = 20,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Operators and kinds to show.")] = 12,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of torch and of the roofline.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="The seed.")] = 0,
    json: Json = False,
) -> None:
    """Train some steps one operator at a time; tell the time, cost and place under the roofline of each. Of a script,
    tell where the time of its own loop goes."""
    if is_script(recipe):
        refuse_options("profile", {"--set": settings, "--seed": seed})
        _profile_script(recipe, arguments or [], plan, workers, steps, top, threads, json=json)
        return
    check_no_arguments(recipe, arguments)
    if plan is not None or workers is not None:
        raise UsageError("a recipe is profiled on one rank; leave --plan and --workers out, or profile a script")
    from weft.cli.output import print_json, print_tables
    from weft.operators.roofline import measure_roofline
    from weft.recipes import find_recipe
    from weft.runs.job import with_settings
    from weft.training.profiling import profile_recipe

    chosen = with_settings(find_recipe(recipe), settings or [])
    roofline = measure_roofline(threads)
    found = profile_recipe(chosen, seed=seed, num_steps=steps, num_threads=threads, roofline_of=lambda _: roofline)
    if json:
        print_json({"recipe": chosen.name, "roofline": roofline, "profile": found})
    else:
        print_tables(_render(found, roofline, top))


def _profile_script(
    path: str,
    arguments: list[str],
    plan: str | None,
    workers: int | None,
    steps: int,
    top: int,
    threads: int,
    *,
    json: bool,
) -> None:
    from weft.cli.output import print_json, print_tables
    from weft.engines.fork_server import start_fork_server

    start_fork_server()
    from weft.operators.roofline import measure_roofline
    from weft.runs.script import Script, choose_plan
    from weft.runs.script_profile import profile_script

    script, chosen = Script(path, arguments=tuple(arguments)), choose_plan(plan, workers)
    script.check()
    num_ranks = chosen.num_ranks if chosen else workers or 1
    found = profile_script(script, num_ranks, chosen, num_steps=steps, num_threads=threads)
    roofline = measure_roofline(threads)
    if json:
        print_json({"script": path, "workers": num_ranks, "roofline": roofline, "profile": found})
    else:
        print_tables(_render_script(found, roofline, top))


def _render_script(found: ScriptProfile, roofline: Roofline, top: int) -> RenderableType:
    from rich.console import Group

    from weft.operators.bench import place
    from weft.report.table import aligned, note, section

    total = found.seconds.median or 1.0
    parts = [(part, format_quantity(seconds, "s"), f"{seconds / total:.1%}") for part, seconds in found.parts.items()]
    in_calls = sum(operator.seconds for operator in found.operators) or 1.0
    rows = []
    for operator in found.operators[:top]:
        cost, seconds = operator.cost, operator.seconds
        placement = place(cost, seconds, roofline) if cost is not None and cost.bytes_moved and seconds > 0 else None
        cells = _cells(seconds, seconds / in_calls, cost, placement)
        rows.append((operator.target, operator.part, f"{operator.count:g}", *cells))
    headers = ("operator", "part", "calls", "mean", "share", "FLOP", "bytes", "FLOP/s", "FLOP/B", "roof", "of roof")
    return Group(
        section("parts of a step", aligned("lrr", parts, ("part", "median", "share"))),
        section("operators of a step, each call timed", aligned("llrrrrrrrlr", rows, headers)),
        note(f"a step takes {format_quantity(found.seconds.median, 's')} (median of {found.seconds.count} steps)"),
    )


def _render(found: Profile, roofline: Roofline, top: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from weft.operators.roofline_drawing import draw_roofline
    from weft.report.table import aligned, note, section

    kinds, longest = found.kinds[:top], found.longest(top)
    labels = [chr(ord("A") + i % 26) for i in range(len(kinds))]
    points = {label: kind.placement for label, kind in zip(labels, kinds, strict=True) if kind.placement is not None}
    headers = ("median", "share", "FLOP", "bytes", "FLOP/s", "FLOP/B", "roof", "of roof")
    kind_rows = [_kind_row(label, kind) for label, kind in zip(labels, kinds, strict=True)]
    rows = [_operator_row(operator, found.seconds.median) for operator in longest]
    parts: list[RenderableType] = [
        section("kinds of operators", aligned("llrrrrrrrlr", kind_rows, ("", "kind", "count", *headers))),
        section("longest operators", aligned("lllrrrrrrlr", rows, ("operator", "part", "line", *headers))),
        section(f"roofline of {roofline.num_threads} thread(s)", [Text(r) for r in draw_roofline(roofline, points)]),
        note(_summary(found)),
    ]
    if found.unknown:
        parts.append(note(f"cost not known: {', '.join(found.unknown)}"))
    return Group(*parts)


def _summary(found: Profile) -> str:
    interval = found.seconds.interval
    spread = (
        f" [{format_quantity(interval.low, 's')}, {format_quantity(interval.high, 's')}]" if interval.is_known else ""
    )
    return (
        f"{len(found.operators)} operators take {format_quantity(found.seconds.median, 's')}{spread} a step: "
        f"{format_quantity(found.cost.flops, 'FLOP')}, {format_quantity(found.cost.bytes_moved, 'B')} moved "
        f"(median of {found.seconds.count} steps; forward and backward, without the update)"
    )


def _kind_row(label: str, kind: KindProfile) -> Sequence[str]:
    return (label, kind.target, str(kind.count), *_cells(kind.seconds, kind.share, kind.cost, kind.placement))


def _operator_row(operator: OperatorProfile, total: float) -> Sequence[str]:
    cells = _cells(operator.seconds, operator.seconds / total, operator.cost, operator.placement)
    return (operator.name, operator.role, operator.line, *cells)


def _cells(seconds: float, share: float, cost: Cost | None, placement: Placement | None) -> Sequence[str]:
    time = (format_quantity(seconds, "s"), f"{share:.1%}")
    work = ("-", "-") if cost is None else (format_quantity(cost.flops, ""), format_quantity(cost.bytes_moved, "B"))
    if placement is None:
        return (*time, *work, "-", "-", "-", "-")
    roof = "peak" if placement.bound == "compute" else placement.memory
    rate = format_quantity(placement.flop_rate, "FLOP/s")
    return (*time, *work, rate, f"{placement.intensity:.3g}", roof, f"{placement.share:.1%}")
