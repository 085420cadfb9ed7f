"""Metrics: a name, a unit, a direction and the statistic that sums up repeated values."""

from dataclasses import dataclass
from typing import Literal

from weft.errors import RecipeError, nearest

__all__ = ["METRICS", "Direction", "Metric", "Rule", "find_metric"]

Direction = Literal["higher", "lower", "neither"]
Statistic = Literal["median", "olympic mean", "maximum", "sum"]


@dataclass(frozen=True)
class Metric:
    """A quantity with a direction. `direction` says which way is better; "neither" is for facts such as a count."""

    name: str
    unit: str
    direction: Direction
    statistic: Statistic = "median"

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.direction == "higher" else value < than if self.direction == "lower" else False


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("loss", "nat", "lower"),
        Metric("accuracy", "", "higher"),
        Metric("top5_accuracy", "", "higher"),
        Metric("l1_error", "", "lower"),
        Metric("l2_error", "", "lower"),
        Metric("max_error", "", "lower"),
        Metric("time_to_target", "s", "lower"),
        Metric("epochs_to_target", "epochs", "lower"),
        Metric("samples_to_target", "samples", "lower"),
        Metric("wall_clock", "s", "lower"),
        Metric("throughput", "samples/s", "higher"),
        Metric("step_time", "s", "lower"),
        Metric("data_wait", "s", "lower"),
        Metric("communication_exposed", "s", "lower"),
        Metric("communication_hidden", "s", "neither"),
        Metric("communication_overhead", "s", "lower"),
        Metric("communication_time", "s", "lower"),
        Metric("compression_time", "s", "lower"),
        Metric("bytes_per_step", "B", "lower"),
        Metric("wire_bytes_per_step", "B", "lower"),
        Metric("payload_ratio", "", "higher"),
        Metric("activation_bytes", "B", "lower"),
        Metric("scaling_efficiency", "", "higher"),
        Metric("consensus_distance", "", "lower"),
        Metric("idle_share", "", "lower"),
        Metric("bubble_share", "", "lower"),
        Metric("staleness", "updates", "lower"),
        Metric("dropped_gradients", "", "lower"),
        Metric("lost_ranks", "", "lower"),
        Metric("lost_updates", "updates", "lower"),
        Metric("returned_ranks", "", "lower"),
        Metric("peak_process_memory", "B", "lower", "maximum"),
        Metric("peak_tensor_memory", "B", "lower", "maximum"),
        Metric("optimizer_memory", "B", "lower", "maximum"),
        Metric("flops_per_sample", "FLOP", "neither"),
        Metric("flop_rate", "FLOP/s", "higher"),
        Metric("share_of_peak", "", "higher"),
        Metric("energy", "J", "lower"),
        Metric("dataset_bias", "", "lower"),
        Metric("sampler_order", "", "neither"),
    )
}


def find_metric(name: str) -> Metric:
    """The metric of a plain name or of one with a split in front: `accuracy`, `test/accuracy`."""
    plain = name.rpartition("/")[2]
    if plain not in METRICS:
        raise RecipeError(f"unknown metric ({name}); {nearest(plain, METRICS)}")
    return METRICS[plain]


@dataclass(frozen=True)
class Rule:
    """An acceptance rule: the named value must be at least, or at most, the bound, as the metric's direction says.

    >>> Rule("test/accuracy", 0.97).accepts(0.98), Rule("test/loss", 0.1).accepts(0.2)
    (True, False)
    """

    metric: str
    bound: float

    def __post_init__(self) -> None:
        if find_metric(self.metric).direction == "neither":
            raise RecipeError(f"metric has no better and worse, so it cannot be a rule (metric: {self.metric})")

    def accepts(self, value: float) -> bool:
        # Comparisons with not-a-number are false, so a value that is not a number is never accepted.
        return value >= self.bound if find_metric(self.metric).direction == "higher" else value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if find_metric(self.metric).direction == "higher" else "<="
        return f"{self.metric} {sign} {self.bound:g}"
