"""The training step in one process: Weft's graph executors and their peers, interleaved in one run.

    python -m benchmarks.graph_step [--case gpt] [--seconds 15] [--out benchmarks/results/graph_step.json]

Every system has a process of two threads that sleeps but for its turn. A round gives each system a few steps, in a
random order; how many times as fast one is as another is the median of the ratios within rounds.

Weft has the C library keep freed memory, which makes plain PyTorch faster, too. So peers run twice: as they come, and
with this setting. Against the second, what is ahead of 1 is the graph's doing.
"""

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graph_steps.cases import CASES
from benchmarks.graph_steps.overhead import measure_overhead
from benchmarks.graph_steps.systems import SYSTEMS
from benchmarks.graph_steps.workers import Worker, WorkerError
from weft.atomic import write_json
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions

__all__ = ["RATIOS", "main", "mean_row", "measure", "row_of"]

RESULTS = Path(__file__).parent / "results" / "graph_step.json"
NUM_THREADS = 2
MIN_ROUNDS = 6  # an interval of the median needs as many values
TURN = 0.15  # seconds
NUM_RESAMPLES = 2000

RATIOS = {
    "graph_to_eager": ("graph", "eager"),
    "graph_to_eager_memory_kept": ("graph", "eager, memory kept"),
    "inductor_to_compile": ("inductor", "torch.compile"),
    "inductor_to_compile_memory_kept": ("inductor", "torch.compile, memory kept"),
    "inductor_to_jax": ("inductor", "jax"),
}
"""How many times as fast the first is as the second."""

Seconds = Mapping[str, Sequence[float]]


def measure(workers: Mapping[str, Worker], case: str, seconds: float) -> dict[str, list[float]]:
    """Seconds per step of every system, round by round."""
    steps = {name: max(1, round(TURN / worker.run(case, 2))) for name, worker in workers.items()}
    order, values = list(workers), {name: list[float]() for name in workers}
    deadline, dice = time.monotonic() + seconds, random.Random(0)
    while time.monotonic() < deadline or len(values[order[0]]) < MIN_ROUNDS:
        dice.shuffle(order)
        for name in order:
            values[name].append(workers[name].run(case, steps[name]))
    return values


def row_of(case: str, values: Seconds, losses: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """One case: milliseconds per step, ratios with their intervals (95%), and whether the graph has eager's bits."""
    row: dict[str, Any] = {"benchmark": "graph_step", "case": case}
    for system in ("eager", "graph", "inductor"):
        if system in values:
            row[f"{system}_ms"] = round(1e3 * summarise(values[system]).median, 3)
    for name, (ours, theirs) in RATIOS.items():
        if ours in values and theirs in values:
            ratio = compare_pairs(values[theirs], values[ours], METRICS["step_time"])
            row[name] = round(ratio.ratio, 3)
            row[f"interval_of_{name}"] = [round(ratio.interval.low, 3), round(ratio.interval.high, 3)]
    if "graph" in losses and "eager" in losses:
        row["bits_of_eager"] = "yes" if losses["graph"] == losses["eager"] else "no"
    row["raw_ms"] = {name: [round(1e3 * value, 4) for value in rounds] for name, rounds in values.items()}
    return row


def mean_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The geometric means of the ratios over cases; the intervals are of resampled rounds."""
    row: dict[str, Any] = {"benchmark": "graph_step", "case": "geometric mean"}
    dice = np.random.default_rng(0)
    for name, (ours, theirs) in RATIOS.items():
        if not all(name in found for found in rows):
            continue
        logs = [np.log(np.divide(found["raw_ms"][theirs], found["raw_ms"][ours])) for found in rows]
        drawn = [np.median(dice.choice(values, (NUM_RESAMPLES, len(values))), axis=1) for values in logs]
        low, high = np.quantile(np.mean(drawn, axis=0), (0.025, 0.975))
        row[name] = round(math.exp(float(np.mean([np.median(values) for values in logs]))), 3)
        row[f"interval_of_{name}"] = [round(math.exp(low), 3), round(math.exp(high), 3)]
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    load_before = os.getloadavg()[0]
    overhead = measure_overhead()
    print("ns per operator: " + ", ".join(f"{name} {value:.0f}" for name, value in overhead.items()), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        workers = {name: Worker(name, NUM_THREADS, Path(folder)) for name in options.system}
        try:
            for case in options.case:
                rows.append(_measure_case(workers, case, options.seconds))
                _print_row(rows[-1])
        finally:
            for worker in workers.values():
                worker.close()
    rows.append(mean_row(rows))
    _print_row(rows[-1])
    if options.out:
        write_json(options.out, _document(rows, overhead, load_before))


def _measure_case(workers: dict[str, Worker], case: str, seconds: float) -> dict[str, Any]:
    """A system that does not run a case, such as one that is not installed, is reported and left out from then on."""
    losses: dict[str, list[str]] = {}
    for worker in workers.values():
        worker.begin_to_load(case)
    for name, worker in list(workers.items()):
        try:
            losses[name] = worker.losses()
        except WorkerError as error:
            print(f"{name} does not run {case}: {error}", flush=True)
            workers.pop(name).close()
    values = measure(workers, case, seconds)
    for worker in workers.values():
        worker.forget()
    return row_of(case, values, losses)


def _print_row(row: Mapping[str, Any]) -> None:
    print(f"\n{row['case']}", flush=True)
    for name, rounds in row.get("raw_ms", {}).items():
        summary = summarise(rounds)
        print(f"  {name:28} {summary.median:9.3f} ms  ({summary.interval}), {summary.count} rounds", flush=True)
    for name in RATIOS:
        if name in row:
            low, high = row[f"interval_of_{name}"]
            print(f"  {name:36} {row[name]:.3f}  ({low:.3f} to {high:.3f})", flush=True)
    if "bits_of_eager" in row:
        print(f"  bits of eager: {row['bits_of_eager']}", flush=True)


def _document(rows: list[dict[str, Any]], overhead: Mapping[str, float], load_before: float) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "load_before": load_before,  # what else the machine did, in processes that ran or wanted to
        "versions": describe_versions() | {"jax": _version("jax")},
        "source": describe_source(),
        "nanoseconds_per_operator": {name: round(value) for name, value in overhead.items()},
        "rows": rows,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the training step of the graph executors and their peers.")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=15.0, help="per case, without the start")
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
