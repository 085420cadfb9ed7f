"""What the examples of this folder share: cases that are simulated for some seeds, and what is kept of them.

Every case trains `digits_mlp` on the virtual cluster: the scheme's own code and real mathematics, in virtual time. How
long a rank computes is drawn from `arrivals.txt` by seed, rank and that rank's step: all cases meet the same delays.
"""

import argparse
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from examples.papers.arrivals import ARRIVALS, median_step
from examples.papers.chart import Panel, Point, Series, draw
from weft.atomic import write_json, write_text
from weft.distributed.virtual import TEN_GIGABIT
from weft.planning.network import NetworkModel
from weft.recipes import find_recipe
from weft.records.record import Repetition
from weft.records.run_folder import create_run_folder
from weft.records.strict_json import encode_json
from weft.runs.job import with_plan, with_settings
from weft.simulation.simulation import simulate
from weft.simulation.stragglers import parse_stragglers
from weft.specs import parse_plan

__all__ = [
    "Case",
    "Options",
    "Row",
    "fastest_of",
    "parse_options",
    "run_cases",
    "series_of",
    "sweep",
    "to_target",
    "write_results",
]

RESULTS = Path("docs") / "papers"
KEPT = (
    "time_to_target",
    "samples_to_target",
    "test/accuracy",
    "wall_clock",
    "idle_share",
    "staleness",
    "dropped_gradients",
)


@dataclass(frozen=True)
class Case:
    """A plan with its settings. `x` is its tick in the chart, `name` the line that it is a point of."""

    name: str
    x: str
    plan: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A case, and the values of every metric, one for each seed."""

    case: Case
    values: dict[str, list[float]]

    def middle(self, metric: str) -> float:
        return median(self.values[metric])


@dataclass(frozen=True)
class Options:
    """What the command line of an example says."""

    ranks: tuple[int, ...]
    values: tuple[str, ...]
    num_seeds: int
    epochs: float
    out: Path


def parse_options(
    doc: str, arguments: Sequence[str] | None, *, ranks: str, values: str, seeds: int, epochs: float
) -> Options:
    """The options that all examples have, with the defaults of this one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=ranks, help=f"virtual ranks ({ranks})")
    parser.add_argument("--values", default=values, help=f"what is varied ({values})")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"trainings of each case ({seeds})")
    parser.add_argument("--epochs", type=float, default=epochs, help=f"at the most ({epochs:g})")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the JSON file and the chart ({RESULTS})")
    given = parser.parse_args(arguments)
    numbers = tuple(int(number) for number in given.ranks.split(","))
    return Options(numbers, tuple(given.values.split(",")), given.seeds, given.epochs, given.out)


def to_target(*, batch_size: int, lr: float, epochs: float) -> tuple[str, ...]:
    """Settings of a training with plain SGD that ends when 93% of the validation set are right."""
    return (
        f"batch_size={batch_size}",
        "optimizer=sgd",
        f"optimizer.lr={lr}",
        "schedule=constant",
        f"epochs={epochs:g}",
        "evaluate_every=0.5",
        "target=accuracy:0.93",
    )


def sweep(
    options: Options, consistency: str, settings: tuple[str, ...], network: NetworkModel = TEN_GIGABIT
) -> list[Row]:
    """A row for each of the values, which stands in the plan where `consistency` says `{value}`."""
    num_ranks = options.ranks[0]
    cases = [
        Case(f"{num_ranks} workers", value, f"data={num_ranks} consistency={consistency.format(value=value)}", settings)
        for value in options.values
    ]
    return run_cases(cases, options.num_seeds, network)


def run_cases(cases: Sequence[Case], num_seeds: int, network: NetworkModel = TEN_GIGABIT) -> list[Row]:
    """Simulate the cases one after the other, with a line of progress for each."""
    rows = []
    for number, case in enumerate(cases, 1):
        began = time.perf_counter()
        rows.append(_run(case, num_seeds, network))
        told = f"{rows[-1].middle('wall_clock'):.4g} s, accuracy {rows[-1].middle('test/accuracy'):.4f}"
        took = f"in {time.perf_counter() - began:.0f} s"
        print(f"{number}/{len(cases)}  {case.name}, {case.x}: {told}  ({took})", file=sys.stderr, flush=True)
    return rows


def _run(case: Case, num_seeds: int, network: NetworkModel) -> Row:
    recipe = with_plan(with_settings(find_recipe("digits_mlp"), case.settings), case.plan, None)
    with tempfile.TemporaryDirectory() as scratch:
        simulation = simulate(
            recipe,
            folder=create_run_folder(Path(scratch) / "run", recipe.name),
            seeds=range(num_seeds),
            network=network,
            compute=median_step(),
            stragglers=parse_stragglers(f"steps from {ARRIVALS}"),
        )
    num_ranks = parse_plan(case.plan).num_ranks
    found = [_values_of(repetition, num_ranks) for repetition in simulation.record.repetitions]
    return Row(case, {metric: [values[metric] for values in found] for metric in found[0]})


def _values_of(repetition: Repetition, num_ranks: int) -> dict[str, float]:
    """What is kept of a training. Where the target was not met, what it takes to meet it is infinite."""
    kept = {name: repetition.values[name] for name in KEPT if name in repetition.values}
    if "time_to_target" in kept:
        num_steps = repetition.evaluations[-1].step if math.isfinite(kept["time_to_target"]) else math.inf
        kept["bytes_to_target"] = repetition.values["bytes_per_step"] * num_ranks * num_steps  # it stops at the target
    return kept


def fastest_of(rows: Sequence[Row], varied: str) -> dict[str, Any]:
    """Which value of what was varied is soonest at the target, and how much sooner than the first."""
    best = min(rows, key=lambda row: row.middle("time_to_target"))
    return {
        f"best_{varied}": best.case.x,
        f"seconds_to_target_at_best_{varied}": best.middle("time_to_target"),
        f"seconds_to_target_at_first_{varied}": rows[0].middle("time_to_target"),
    }


def series_of(rows: Sequence[Row], metric: str, scale: float = 1.0) -> tuple[Series, ...]:
    """A line for each name among the cases, in their order."""
    names = dict.fromkeys(row.case.name for row in rows)
    return tuple(
        Series(name, tuple(_point(row.values[metric], scale) for row in rows if row.case.name == name))
        for name in names
    )


def _point(values: Sequence[float], scale: float) -> Point:
    return Point(median(values) * scale, min(values) * scale, max(values) * scale)


def write_results(
    name: str, title: str, options: Options, rows: Sequence[Row], panels: Sequence[Panel], finding: dict[str, Any]
) -> None:
    """NAME.json, which holds every value of every seed, and NAME.svg; and say what was found."""
    document = {
        "title": title,
        "recipe": "digits_mlp",
        "arrivals_sha256": hashlib.sha256(ARRIVALS.read_bytes()).hexdigest(),
        "seeds": options.num_seeds,
        "finding": finding,
        "rows": [
            {"line": row.case.name, "x": row.case.x, "plan": row.case.plan, "settings": row.case.settings}
            | {"values": row.values}
            for row in rows
        ],
    }
    write_json(options.out / f"{name}.json", encode_json(document))
    write_text(options.out / f"{name}.svg", draw(title, panels))
    for key, value in finding.items():
        print(f"{key.replace('_', ' ')}: {value}")
    print(f"written: {options.out / name}.json and .svg")
