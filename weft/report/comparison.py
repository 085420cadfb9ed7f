"""Two runs side by side: medians, intervals, how many times better B is, and a verdict in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from weft.errors import ComparisonError
from weft.metrics.comparison import Comparison, compare
from weft.metrics.statistics import MIN_VALUES_FOR_RATIO
from weft.records.record import RunRecord
from weft.report.quantity import scale_of
from weft.report.rows import (
    FEWEST_FOR_INTERVAL,
    Spread,
    format_spread,
    format_value,
    measured_values,
    metric_of,
    rank,
    spread_of,
    value_names,
)
from weft.report.settings import SettingDifference, differences
from weft.report.table import Cell, aligned, note, section

__all__ = ["MetricComparison", "RunComparison", "check_comparable", "compare_runs", "render_comparison"]


@dataclass(frozen=True)
class MetricComparison:
    """One metric of both runs."""

    name: str
    result: Comparison
    spread_a: Spread
    spread_b: Spread


@dataclass(frozen=True)
class RunComparison:
    """Every metric that both runs have, and the settings that they do not share."""

    metrics: tuple[MetricComparison, ...]
    differences: tuple[SettingDifference, ...]
    notes: tuple[str, ...]


def check_comparable(a: RunRecord, b: RunRecord) -> None:
    """Refuse two runs of different problems: their fixed parts or their data differ."""
    if a.fixed_hash != b.fixed_hash:
        first = next(
            (d for d in differences(a, b) if d.part == "fixed"), SettingDifference("fixed", "name", a.name, b.name)
        )
        raise ComparisonError(
            f"runs are of different problems ({first.key}, A: {first.a}, B: {first.b}); "
            "choose runs with one fixed part, or add --force"
        )
    data_a, data_b = _checksums(a), _checksums(b)
    if data_a and data_b and data_a != data_b:
        raise ComparisonError(
            f"runs were trained on different data (checksum, A: {min(data_a)[:12]}, B: {min(data_b)[:12]}); "
            "run both on one copy of the data, or add --force"
        )


def compare_runs(a: RunRecord, b: RunRecord) -> RunComparison:
    """Compare every metric that both runs have; whether they may be compared is `check_comparable`'s to say."""
    values_a, values_b = measured_values(a, value_names(b)), measured_values(b, value_names(a))
    shared = [name for name in values_a if name in values_b]
    if not shared:
        raise ComparisonError(
            f"runs share no metric (A: {_listed(values_a)}; B: {_listed(values_b)}); choose runs that have ended"
        )
    metrics = tuple(_compare_metric(name, values_a[name], values_b[name]) for name in shared)
    return RunComparison(metrics, tuple(differences(a, b)), tuple(_notes(a, b, metrics)))


def _compare_metric(name: str, a: Sequence[float], b: Sequence[float]) -> MetricComparison:
    metric = metric_of(name)
    spreads = (spread_of([rank(value, metric) for value in values]) for values in (a, b))
    return MetricComparison(name, compare(a, b, metric), *spreads)


def _notes(a: RunRecord, b: RunRecord, metrics: Sequence[MetricComparison]) -> list[str]:
    notes = ["gain: how many times better B is than A; for a time or a rate, the speed-up"]
    if any(not spread.is_interval for metric in metrics for spread in (metric.spread_a, metric.spread_b)):
        notes.append(f"(min .. max) of fewer than the {FEWEST_FOR_INTERVAL} values that a 95% interval needs")
    few = [m for m in metrics if min(m.spread_a.count, m.spread_b.count) < MIN_VALUES_FOR_RATIO]
    notes.extend(dict.fromkeys(metric.result.reason for metric in few))
    # Records from before there were devices do not say: all were made on the CPU.
    for key, otherwise in {"cpu": None, "cores": None, "torch_threads": None, "device": "cpu"}.items():
        value_a, value_b = a.machine.get(key, otherwise), b.machine.get(key, otherwise)
        if value_a != value_b:
            notes.append(f"made on different machines ({key}, A: {value_a}, B: {value_b})")
    return notes


def render_comparison(comparison: RunComparison, label_a: str, label_b: str) -> Group:
    parts: list[RenderableType] = [section("compared", aligned("ll", [("A", label_a), ("B", label_b)]))]
    if comparison.differences:
        changed = [(difference.key, difference.a, difference.b) for difference in comparison.differences]
        parts.append(section("set differently", aligned("lll", changed, ("setting", "A", "B"))))
    rows = [row for metric in comparison.metrics for row in _rows(metric)]
    lines = aligned("llrlrl", rows, ("metric", "", "median", "", "95% interval", ""))
    parts.append(section("measured", [*lines, *map(note, comparison.notes)]))
    return Group(*parts)


def _rows(metric: MetricComparison) -> list[tuple[Cell, ...]]:
    """Name, direction and verdict on the left; A, B and the gain on the right; an empty line."""
    result, kind = metric.result, metric.result.metric
    scale = scale_of([result.a.median, result.b.median], kind.unit)
    value_a, value_b = (format_value(side.median, kind, scale) for side in (result.a, result.b))
    spread_a, spread_b = (format_spread(spread, kind, scale) for spread in (metric.spread_a, metric.spread_b))
    direction, gain = (f"{kind.direction} is better", "gain") if kind.direction != "neither" else ("", "ratio")
    return [
        (metric.name, "A", value_a, scale.unit, spread_a, ""),
        (note(direction), "B", value_b, scale.unit, spread_b, ""),
        (_verdict(result), gain, *_gain(result), _p_text(result.p_value)),
        ("",) * 6,
    ]


def _verdict(result: Comparison) -> Text:
    if not result.is_shown or result.metric.direction == "neither":
        return Text(result.verdict)
    return Text(result.verdict, "green" if result.metric.is_better(result.b.median, result.a.median) else "red")


def _gain(result: Comparison) -> tuple[str, str, str]:
    """The ratio, its sign, and its interval, as far as they mean anything."""
    if not math.isfinite(result.ratio):
        return "-", "", ""
    interval = result.ratio_interval
    return f"{result.ratio:.3f}", "x", f"{interval.low:.3f} .. {interval.high:.3f}" if interval.is_known else ""


def _p_text(p_value: float) -> str:
    return "p < 0.0001" if p_value < 1e-4 else f"p {p_value:.2g}"


def _checksums(record: RunRecord) -> set[str]:
    return {repetition.data_checksum for repetition in record.repetitions if repetition.data_checksum}


def _listed(names: dict[str, list[float]]) -> str:
    return ", ".join(names) or "none"
