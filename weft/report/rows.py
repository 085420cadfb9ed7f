"""Every metric of a record as one row: a statistic over the repetitions, and how far it can be trusted."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weft.errors import RecipeError
from weft.metrics.metric import Metric, Statistic, find_metric
from weft.metrics.record import RunRecord
from weft.metrics.statistics import STATISTICS, UNKNOWN, median_interval
from weft.report.quantity import Scale, scale_of

__all__ = ["MetricRow", "format_value", "metric_of", "metric_rows", "row_of"]

FEWEST_FOR_STATISTIC = 3  # the olympic mean drops two values


@dataclass(frozen=True)
class MetricRow:
    """`value` is the metric's statistic. `low` and `high` are the 95% interval of the median; where there is none (too
    few values, or a statistic that is no median) they are the smallest and the largest value."""

    name: str
    metric: Metric
    statistic: Statistic
    count: int
    value: float
    low: float
    high: float
    has_interval: bool

    @property
    def scale(self) -> Scale:
        return scale_of([self.value, self.low, self.high], self.metric.unit)


def metric_rows(record: RunRecord) -> list[MetricRow]:
    """A row for each metric that any repetition has, in the order of the record; raw series come last."""
    names = _names(repetition.values for repetition in record.repetitions)
    rows = [row_of(name, record.values_of(name)) for name in names]
    if record.recipe:
        return rows  # the series of a recipe's run are its steps, and their medians are among the values
    series = _names(repetition.series for repetition in record.repetitions)
    return rows + [row_of(name, series_of(record, name)) for name in series if name not in names]


def row_of(name: str, values: Sequence[float]) -> MetricRow:
    metric = metric_of(name)
    ranked = [_ranked(value, metric) for value in values]
    statistic: Statistic = metric.statistic if len(ranked) >= FEWEST_FOR_STATISTIC else "median"
    interval = median_interval(ranked) if statistic == "median" else UNKNOWN
    low, high = (interval.low, interval.high) if interval.is_known else (min(ranked), max(ranked))
    value = STATISTICS[statistic](ranked)
    return MetricRow(name, metric, statistic, len(ranked), value, low, high, interval.is_known)


def series_of(record: RunRecord, name: str) -> list[float]:
    """The raw values of all repetitions together."""
    return [value for repetition in record.repetitions for value in repetition.series.get(name, ())]


def metric_of(name: str) -> Metric:
    """The known metric of this name; a name that a user made up is a number without unit and direction."""
    try:
        return find_metric(name)
    except RecipeError:
        return Metric(name, "", "neither")


def format_value(value: float, metric: Metric, scale: Scale) -> str:
    if math.isfinite(value):
        return scale.format(value)
    return "never" if metric.name.endswith("_to_target") else "failed"


def _ranked(value: float, metric: Metric) -> float:
    """A failure, which is any value that is not finite, at the worse end of the order."""
    return value if math.isfinite(value) else -math.inf if metric.direction == "higher" else math.inf


def _names(groups: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))
