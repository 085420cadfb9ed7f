"""`weft op`: check an operator, and place it under this machine's roofline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.options import Json
from weft.report.quantity import format_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from weft.operators.bench import BenchResult
    from weft.operators.check import Finding
    from weft.operators.roofline import Roofline

__all__ = ["op"]

op = typer.Typer(help="Check and time operators.", no_args_is_help=True, rich_markup_mode=None)

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A Python file with operators and their samples.", show_default=False)
]

MAX_FAULTS = 8  # shown for each check of an operator; --json has all


@op.command("check")
def check(
    file: File,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="The seed of the samples.")] = 0,
    json: Json = False,
) -> None:
    """Check every operator of a file: values, gradients, layouts, shapes, memory."""
    from weft.cli.output import print_json, print_tables
    from weft.operators.check import check_operator
    from weft.operators.operator import load_operators

    findings = [finding for operator in load_operators(file) for finding in check_operator(operator, seed=seed)]
    passed = all(finding.passed for finding in findings)
    if json:
        print_json({"file": str(file), "passed": passed, "findings": findings})
    else:
        print_tables(_render_findings(findings))
    raise typer.Exit(0 if passed else 1)


@op.command("bench")
def bench(
    file: File,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="Threads of torch and of the roofline.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.001, metavar="T", help="Time for each call at most.")] = 0.5,
    json: Json = False,
) -> None:
    """Time every operator of a file, and hold it against the machine's measured ceilings."""
    import torch

    from weft.cli.output import print_json, print_tables
    from weft.operators.bench import bench_operator
    from weft.operators.operator import load_operators
    from weft.operators.roofline import measure_roofline

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        roofline = measure_roofline(threads)
        operators = load_operators(file)
        results = [r for operator in operators for r in bench_operator(operator, roofline, max_seconds=seconds)]
    finally:
        torch.set_num_threads(before)
    if json:
        print_json({"file": str(file), "roofline": roofline, "results": results})
    else:
        print_tables(_render_bench(roofline, results))


def _render_findings(findings: Sequence[Finding]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from weft.report.table import aligned, section

    sections = []
    for operator in dict.fromkeys(finding.operator for finding in findings):
        own = [finding for finding in findings if finding.operator == operator]
        rows = [row for name in dict.fromkeys(f.check for f in own) for row in _check_rows(name, own)]
        headers = ("check", "verdict", "count", "worst error", "allowed", "where")
        sections.append(section(operator, aligned("llrrrl", rows, headers)))
    num_faults = sum(not finding.passed for finding in findings)
    verdict = (
        f"FAIL: {num_faults} of {len(findings)} comparisons" if num_faults else f"PASS: {len(findings)} comparisons"
    )
    return Group(*sections, Text(verdict, "red" if num_faults else "green"))


def _check_rows(check: str, findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """One line for a check that passed; one for each fault, up to a limit, for one that did not."""
    own = [finding for finding in findings if finding.check == check]
    faults = [finding for finding in own if not finding.passed]
    if not faults:
        worst = max(own, key=lambda finding: finding.error)
        notes = {finding.note for finding in own if finding.note}
        remark = next(iter(notes)) if len(notes) == 1 else f"{len(notes)} remarks in --json" if notes else ""
        return [(check, "PASS", str(len(own)), f"{worst.error:.1e}", f"{worst.tolerance:.1e}", remark)]
    count = f"{len(faults)}/{len(own)}"
    rows: list[tuple[str, ...]] = [
        (check, "FAIL", count, f"{f.error:.1e}", f"{f.tolerance:.1e}", f"sample {f.sample}, {f.subject}: {f.note}")
        for f in faults[:MAX_FAULTS]
    ]
    if len(faults) > MAX_FAULTS:
        rows.append(("", "", "", "", "", f"and {len(faults) - MAX_FAULTS} more; --json has all"))
    return rows


def _render_bench(roofline: Roofline, results: Sequence[BenchResult]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from weft.operators.roofline_drawing import draw_roofline
    from weft.report.table import aligned, note, section

    labels = [chr(ord("A") + i % 26) for i in range(len(results))]
    rows = [_bench_row(label, result) for label, result in zip(labels, results, strict=True)]
    headers = ("", "operator", "direction", "shapes", "median", "FLOP/s", "B/s", "FLOP/B", "roof", "of roof")
    placed = [(label, r) for label, r in zip(labels, results, strict=True) if r.placement is not None]
    dtype = placed[0][1].dtype if placed else "float32"
    points = {label: r.placement for label, r in placed if r.placement is not None}
    picture = [Text(line) for line in draw_roofline(roofline, points, dtype)]
    return Group(
        section("operators", aligned("llllrrrrlr", rows, headers)),
        section(f"roofline of {roofline.num_threads} thread(s), {dtype}", picture),
        section("ceilings", aligned("lrl", _ceiling_rows(roofline), ("", "measured", ""))),
        note("Data count as lying in the nearest memory that holds all bytes moved: a share above 1 means nearer."),
    )


def _bench_row(label: str, result: BenchResult) -> tuple[str, ...]:
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in result.shapes)
    head = (label, result.operator, result.direction, shapes, format_quantity(result.seconds.median, "s"))
    found = result.placement
    if found is None:
        return (*head, "-", "-", "-", "cost not known", "-")
    roof = "peak" if found.bound == "compute" else found.memory
    rates = (
        format_quantity(found.flop_rate, "FLOP/s"),
        format_quantity(found.byte_rate, "B") + "/s",
        f"{found.intensity:.3g}",
    )
    return (*head, *rates, roof, f"{found.share:.1%}")


def _ceiling_rows(roofline: Roofline) -> list[tuple[str, str, str]]:
    rows = []
    for memory in roofline.ceilings:
        size = "" if memory.num_bytes is None else f"up to {memory.num_bytes / 2**10:,.0f} KiB"
        rows.append((memory.name, format_quantity(memory.bytes_per_second, "B") + "/s", size))
    for name, peak in roofline.peaks.items():
        remark = "frequency not known"
        if peak.nominal is not None and roofline.frequency is not None:
            remark = (
                f"{format_quantity(peak.nominal, 'FLOP/s')} from {roofline.frequency / 1e9:.2f} GHz x "
                f"{8 * roofline.vector_bytes} bits x 2 multiply-adds a cycle"
            )
        rows.append((f"peak {name}", format_quantity(peak.measured, "FLOP/s"), remark))
    return rows
