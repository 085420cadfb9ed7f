"""The result of one run: what was measured, how it went, and whether it is accepted."""

import math
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from weft.metrics.record import Repetition, RunRecord, Verdict
from weft.report.curve import sparkline
from weft.report.provenance import provenance_rows
from weft.report.quantity import format_plain
from weft.report.rows import MetricRow, format_value, metric_of, metric_rows
from weft.report.table import make_table, section

__all__ = ["render_run"]

FEWEST_FOR_INTERVAL = 6


def render_run(record: RunRecord, *, details: bool = False) -> Group:
    """The report of a run; with details, also how, with what and where it was made."""
    rows = metric_rows(record)
    parts: list[RenderableType] = [_headline(record)]
    if rows:
        parts.append(section("measured", Group(_metric_table(rows), *_notes(rows))))
    parts.extend(_curve_sections(record))
    if record.verdicts:
        parts.append(section("accepted" if record.accepted else "not accepted", _verdict_table(record.verdicts)))
    if details:
        parts.append(section("made with", make_table((("", "left"), ("", "left")), provenance_rows(record))))
    return Group(*parts)


def _headline(record: RunRecord) -> Group:
    lines = [Text(f"{state}: {seeds}", style) for state, seeds, style in _outcomes(record.repetitions)]
    return Group(Text(record.name, "bold"), *(Text("  ").append_text(line) for line in lines), Text())


def _outcomes(repetitions: Sequence[Repetition]) -> list[tuple[str, str, str]]:
    """Repetitions that ended alike, together: what happened, the seeds, and a style."""

    def state(repetition: Repetition) -> tuple[str, str]:
        return repetition.status, repetition.stop_reason

    found = []
    for (status, reason), members in groupby(sorted(repetitions, key=state), key=state):
        seeds = [str(member.seed) for member in members]
        label = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
        style = {"done": "", "failed": "red"}.get(status, "yellow")
        found.append((f"{status}, {reason}" if reason else status, label, style))
    return found


def _metric_table(rows: Sequence[MetricRow]) -> RenderableType:
    spread = _spread_header(rows)
    columns = (("metric", "left"), ("median", "right"), (spread, "right"), ("unit", "left"), ("better", "left"))
    return make_table(columns, [_metric_cells(row) for row in rows])


def _spread_header(rows: Sequence[MetricRow]) -> str:
    repeated = [row.has_interval for row in rows if row.count > 1]
    if not repeated:
        return ""
    return "95% interval" if all(repeated) else "[95% interval] or min .. max" if any(repeated) else "min .. max"


def _metric_cells(row: MetricRow) -> tuple[str, str, str, str, str]:
    scale = row.scale
    value, low, high = (format_value(number, row.metric, scale) for number in (row.value, row.low, row.high))
    if row.statistic != "median":
        value = f"{row.statistic} {value}"
    spread = "" if row.count == 1 else f"{low} .. {high}"
    better = "" if row.metric.direction == "neither" else row.metric.direction
    return row.name, value, spread, scale.unit, better


def _notes(rows: Sequence[MetricRow]) -> list[Text]:
    counts = {row.count for row in rows if row.statistic == "median" and not row.has_interval}
    if not counts:
        return []
    have = "one value" if counts == {1} else f"{max(counts)} values"
    return [Text(f"{have}: a 95% interval needs at least {FEWEST_FOR_INTERVAL} (--repeat)", "dim")]


def _verdict_table(verdicts: Sequence[Verdict]) -> RenderableType:
    rows = [
        (Text("PASS", "green") if verdict.passed else Text("FAIL", "bold red"), verdict.rule, _verdict_value(verdict))
        for verdict in verdicts
    ]
    return make_table((("", "left"), ("", "left"), ("", "right")), rows)


def _verdict_value(verdict: Verdict) -> str:
    metric = metric_of(verdict.rule.split()[0])
    return format_plain(verdict.value) if math.isfinite(verdict.value) else format_value(verdict.value, metric, )


class Curves:
    """The evaluations of one training, a line per value, drawn in what the console can show."""

    def __init__(self, curves: dict[str, list[float]]) -> None:
        self._curves = curves

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unicode = not options.ascii_only
        rows = [
            (name, sparkline(values, unicode=unicode), format_plain(values[0]), "to", format_plain(values[-1]))
            for name, values in self._curves.items()
        ]
        yield make_table((("", "left"), ("", "left"), ("", "right"), ("", "left"), ("", "right")), rows)


def _curve_sections(record: RunRecord) -> list[Group]:
    """The curves of the first repetition that was evaluated more than once."""
    for repetition in record.repetitions:
        if len(repetition.evaluations) > 1:
            title = f"over {repetition.evaluations[-1].epoch:g} epochs (seed {repetition.seed})"
            return [section(title, Curves(_curves_of(repetition)))]
    return []


def _curves_of(repetition: Repetition) -> dict[str, list[float]]:
    names = repetition.evaluations[-1].values
    found = {name: [e.values[name] for e in repetition.evaluations if name in e.values] for name in names}
    steps = {name: list(values) for name, values in repetition.series.items() if name.endswith("/loss")}
    return {**steps, **found}
