"""What `weave` costs a script that runs in one process: its step against the same script without that line.

    python -m benchmarks.weave_overhead

Both take turns in one process, a few steps each, and who begins changes from pair to pair. A small model is where any
overhead would show; the second is of a usual size. The last two have no loader (`weft.share` of batches drawn by hand),
and evaluate through `weft.evaluation`.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.steps.cases import CASES
from benchmarks.steps.systems import SYSTEMS
from weft.atomic import write_json
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions

__all__ = ["main", "measure", "row_of"]

RESULTS = Path(__file__).parent / "results" / "weave_overhead.json"
BAR = 1.02  # for the upper bound of the ratio


@dataclass(frozen=True)
class Comparison:
    """A case, the way in which both scripts go through it, and how often."""

    case: str
    num_pairs: int
    num_steps: int
    way: str = ""  # the end of the names of both systems


COMPARISONS = (
    Comparison("small mlp", 1500, 5),
    Comparison("resnet20", 120, 1),
    Comparison("gpt", 120, 1, way=" by hand"),
    Comparison("small mlp", 1500, 10, way=" evaluation"),
)


def measure(case: str, num_pairs: int, num_steps: int, way: str = "") -> dict[str, list[float]]:
    """Seconds per step of both, pair by pair."""
    steps = {name: SYSTEMS[f"{name}{way}"](CASES[case]) for name in ("plain", "weft")}
    for _ in range(3):
        _time(steps["plain"], num_steps)
        _time(steps["weft"], num_steps)
    values = {name: list[float]() for name in steps}
    order = list(steps)
    for _ in range(num_pairs):
        for name in order:
            values[name].append(_time(steps[name], num_steps))
        order.reverse()
    return values


def row_of(case: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """The ratio woven / plain: the median over pairs and its interval (95%)."""
    ratio = compare_pairs(values["weft"], values["plain"], METRICS["step_time"])
    return {
        "benchmark": "weave_overhead",
        "case": case,
        "num_pairs": ratio.count,
        **{f"{name}_ms_per_step": round(1e3 * summarise(seconds).median, 4) for name, seconds in values.items()},
        "ratio": round(ratio.ratio, 4),
        "interval": [round(ratio.interval.low, 4), round(ratio.interval.high, 4)],
        "is_below_bar": ratio.interval.high < BAR,
        "raw_ms": {name: [round(1e3 * value, 4) for value in seconds] for name, seconds in values.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time weave in one process against plain PyTorch.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before, rows = os.getloadavg()[0], []
    for comparison in COMPARISONS:
        values = measure(comparison.case, comparison.num_pairs, comparison.num_steps, comparison.way)
        row = row_of(f"{comparison.case}{comparison.way}", values)
        low, high = row["interval"]
        print(f"{row['case']}: woven / plain {row['ratio']:.4f} ({low:.4f} to {high:.4f}, {row['num_pairs']} pairs)")
        rows.append(row)
    write_json(
        options.out,
        {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "load_before": load_before,  # what else the machine did, in processes that ran or wanted to
            "versions": describe_versions(),
            "source": describe_source(),
            "rows": rows,
        },
    )


def _time(steps: Iterator[None], num_steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_steps):
        next(steps)
    return (time.perf_counter() - begin) / num_steps


if __name__ == "__main__":
    main()
