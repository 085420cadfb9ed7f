"""The result of one run: what was measured, how it went, and whether it is accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from weft.records.record import Repetition, RunRecord, Verdict
from weft.report.curve import sparkline
from weft.report.histogram import Histogram, added
from weft.report.provenance import provenance_rows
from weft.report.quantity import format_plain, scale_of
from weft.report.rows import (
    FEWEST_FOR_INTERVAL,
    MetricRow,
    format_spread,
    format_value,
    metric_of,
    metric_rows,
    scale_of_row,
)
from weft.report.table import Prose, aligned, note, section
from weft.report.waiting import idle_rows, idle_shares

__all__ = ["render_run"]


def render_run(record: RunRecord, *, details: bool = False) -> Group:
    """The report of a run; with details, also how, with what and where it was made."""
    parts: list[RenderableType] = [section(record.name, _outcomes(record.repetitions))]
    if rows := metric_rows(record):
        parts.append(section("measured", [*metric_lines(rows), *_notes(rows)]))
    if curved := [repetition for repetition in record.repetitions if len(repetition.evaluations) > 1]:
        parts.append(Curves(curved[0]))
    if record.recipe:  # series of a user's own loop mean what the user says
        parts.extend(_of_ranks(record.repetitions))
    if record.verdicts:
        parts.append(section("accepted" if record.accepted else "not accepted", verdict_lines(record.verdicts)))
    if details:
        parts.append(Prose("made with", provenance_rows(record)))
    return Group(*parts)


def _of_ranks(repetitions: Sequence[Repetition]) -> list[RenderableType]:
    """How stale the updates of servers were, and how long simulated ranks waited; of all trainings together."""
    parts: list[RenderableType] = []
    if any(stale := added(repetition.series.get("staleness", ()) for repetition in repetitions)):
        parts.append(Histogram("updates by their staleness", stale))
    if len(shares := idle_shares(repetitions)) > 1:
        parts.append(section("share of its time that a rank waited", aligned("lr", idle_rows(shares))))
    return parts


def _outcomes(repetitions: Sequence[Repetition]) -> list[Text]:
    """A line for the repetitions that ended alike: `done, target reached: seeds 0, 1, 2`."""

    def ending(repetition: Repetition) -> tuple[str, str]:
        return repetition.status, repetition.stop_reason

    lines = []
    for (status, reason), members in groupby(sorted(repetitions, key=ending), key=ending):
        seeds = [str(member.seed) for member in members]
        words = f"{', '.join(filter(None, (status, reason)))}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"
        lines.append(Text(words, {"done": "", "failed": "red"}.get(status, "yellow")))
    return lines


def metric_lines(rows: Sequence[MetricRow]) -> list[Text]:
    is_any_interval = any(row.spread.is_interval for row in rows)
    is_any_repeated = any(row.spread.count > 1 for row in rows)
    spread = "95% interval" if is_any_interval else "(min .. max)" if is_any_repeated else ""
    headers = ("metric", "median" if is_any_repeated else "value", spread, "unit", "better")
    return aligned("lrrll", [_metric_cells(row) for row in rows], headers)


def _metric_cells(row: MetricRow) -> tuple[str, str, str, str, str]:
    scale = scale_of_row(row)
    value = format_value(row.value, row.metric, scale)
    if row.statistic != "median":
        value = f"{row.statistic} {value}"
    better = "" if row.metric.direction == "neither" else row.metric.direction
    return row.name, value, format_spread(row.spread, row.metric, scale), scale.unit, better


def _notes(rows: Sequence[MetricRow]) -> list[Text]:
    counts = [row.spread.count for row in rows if row.statistic == "median" and not row.spread.is_interval]
    if not counts:
        return []
    have = "one value" if max(counts) == 1 else f"{max(counts)} values"
    return [note(f"{have}; a 95% interval of the median needs at least {FEWEST_FOR_INTERVAL}")]


def verdict_lines(verdicts: Sequence[Verdict]) -> list[Text]:
    return aligned("llr", [(_mark(verdict), verdict.rule, _verdict_value(verdict)) for verdict in verdicts])


def _mark(verdict: Verdict) -> Text:
    return Text("PASS", "green") if verdict.passed else Text("FAIL", "bold red")


def _verdict_value(verdict: Verdict) -> str:
    metric = metric_of(verdict.rule.split()[0])
    return format_value(verdict.value, metric, scale_of([verdict.value]))  # no prefix: to be held against the bound


@dataclass(frozen=True)
class Curves:
    """The values of one training over time, a line each, drawn with what the console can show."""

    repetition: Repetition

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title = f"over {self.repetition.evaluations[-1].epoch:g} epochs, seed {self.repetition.seed}"
        yield section(title, curve_lines(self.repetition, unicode=not options.ascii_only))


def curve_lines(repetition: Repetition, *, unicode: bool = True) -> list[Text]:
    """The loss of the steps, and every value of the evaluations."""
    curves = {name: list(values) for name, values in repetition.series.items() if name.endswith("/loss") and values}
    for name in repetition.evaluations[-1].values:
        curves[name] = [e.values[name] for e in repetition.evaluations if name in e.values]
    rows = [
        (name, sparkline(values, unicode=unicode), format_plain(values[0]), "to", format_plain(values[-1]))
        for name, values in curves.items()
    ]
    return aligned("llrlr", rows)
