"""Every metric of a record as one row: a statistic over the repetitions, and how far it can be trusted."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.errors import RecipeError
from weft.metrics.metric import Metric, Statistic, find_metric
from weft.metrics.statistics import STATISTICS, count_warmup, median_interval
from weft.records.record import RunRecord
from weft.report.quantity import Scale, scale_of

__all__ = [
    "FEWEST_FOR_INTERVAL",
    "MetricRow",
    "Spread",
    "format_spread",
    "format_value",
    "measured_values",
    "metric_of",
    "metric_rows",
    "rank",
    "row_of",
    "scale_of_row",
    "spread_of",
    "value_names",
]

FEWEST_FOR_INTERVAL = 6  # values that a 95% interval of the median needs
FEWEST_FOR_STATISTIC = 3  # values that any statistic needs: the olympic mean drops two


@dataclass(frozen=True)
class Spread:
    """The 95% interval of the median; of too few values for one, or of a statistic that is no median, their range."""

    count: int
    low: float
    high: float
    is_interval: bool


@dataclass(frozen=True)
class MetricRow:
    """One metric as it is shown."""

    name: str
    metric: Metric
    statistic: Statistic
    value: float
    spread: Spread


def metric_rows(record: RunRecord) -> list[MetricRow]:
    """A row for each metric that any repetition has, in the order of the record."""
    return [row_of(name, values) for name, values in measured_values(record).items()]


def measured_values(record: RunRecord, also: Iterable[str] = ()) -> dict[str, list[float]]:
    """The values of every metric over all repetitions; `also` names metrics that a run which failed would have had.

    A loop that a user measured has no repetitions to speak of, so there the steps of its series count, without their
    warm-up. The series of a recipe's run are left alone: its repetitions are what is independent.
    """
    found = {name: _with_failures(name, record) for name in dict.fromkeys([*value_names(record), *also])}
    if not record.recipe:
        series = [pair for repetition in record.repetitions for pair in repetition.series.items()]
        found |= {name: [v for other, values in series if other == name for v in _steady(values)] for name, _ in series}
    return {name: values for name, values in found.items() if values}


def value_names(record: RunRecord) -> list[str]:
    return list(dict.fromkeys(name for repetition in record.repetitions for name in repetition.values))


def row_of(name: str, values: Sequence[float]) -> MetricRow:
    metric = metric_of(name)
    ranked = [rank(value, metric) for value in values]
    statistic: Statistic = metric.statistic if len(ranked) >= FEWEST_FOR_STATISTIC else "median"
    spread = spread_of(ranked) if statistic == "median" else range_of(ranked)
    return MetricRow(name, metric, statistic, STATISTICS[statistic](ranked), spread)


def spread_of(ranked: Sequence[float]) -> Spread:
    interval = median_interval(ranked)
    return Spread(len(ranked), interval.low, interval.high, True) if interval.is_known else range_of(ranked)


def range_of(ranked: Sequence[float]) -> Spread:
    return Spread(len(ranked), min(ranked), max(ranked), False)


def metric_of(name: str) -> Metric:
    """The known metric of this name; a name that a user made up is a number without unit and direction."""
    try:
        return find_metric(name)
    except RecipeError:
        return Metric(name, "", "neither")


def rank(value: float, metric: Metric) -> float:
    """The value; a failure, which is any value that is not finite, at the worse end of the order."""
    return value if math.isfinite(value) else -math.inf if metric.direction == "higher" else math.inf


def format_value(value: float, metric: Metric, scale: Scale) -> str:
    if math.isfinite(value):
        return scale.format(value)
    return "never" if metric.name.endswith("_to_target") else "failed"


def format_spread(spread: Spread, metric: Metric, scale: Scale) -> str:
    """`low .. high`, in brackets where it is a range and no interval; empty for one value, or where all failed."""
    if spread.count == 1 or (math.isinf(spread.low) and spread.low == spread.high):
        return ""
    text = f"{format_value(spread.low, metric, scale)} .. {format_value(spread.high, metric, scale)}"
    return text if spread.is_interval else f"({text})"


def scale_of_row(row: MetricRow) -> Scale:
    return scale_of([row.value, row.spread.low, row.spread.high], row.metric.unit)


def _steady(values: Sequence[float]) -> Sequence[float]:
    return values[count_warmup(values) :] if values else values


def _with_failures(name: str, record: RunRecord) -> list[float]:
    """The metric's value in every repetition; where it has a better and a worse, a failed one counts as infinity."""
    judged = metric_of(name).direction != "neither"
    has_value = [r for r in record.repetitions if name in r.values or (judged and r.status == "failed")]
    return [repetition.values.get(name, math.inf) for repetition in has_value]
