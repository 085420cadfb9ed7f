"""The training step on two ranks: Weft and its peers, interleaved in one run, against ranks that do not talk.

    python -m benchmarks.training_step [--case mlp] [--seconds 60] [--system weft]

Every system has its two processes, of one thread each; they sleep but for their turn. A round gives each system a few
steps, in a random order. The ceiling is two ranks that train at the same time and never talk: what two busy cores leave
of one rank's speed. A share of the ceiling is the median over rounds of ceiling / system.

`weave` also tells the C library to keep freed memory, which makes plain PyTorch faster, too. The second ceiling has
this setting: against it, what is missing from 100% is the exchange alone.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.steps.ranks import RankError, Ranks, Times
from weft.atomic import write_json
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions

__all__ = ["main", "measure", "rows_of"]

RESULTS = Path(__file__).parent / "results" / "training_step.json"
CASES = ("mlp", "resnet20", "gpt")
PEERS = ("weft", "ddp gloo", "ddp weft", "fabric", "accelerate", "deepspeed")
PACKAGES = ("lightning-fabric", "accelerate", "deepspeed")
ALONE, CEILING, KEPT = "one rank alone", "ceiling", "ceiling, memory kept"
CEILINGS = {"plain": CEILING, "plain keeping memory": KEPT}
MIN_ROUNDS = 6  # an interval of the median needs as many values
NUM_STEPS = 4

Turn = Callable[[], Times]


def measure(turns: Mapping[str, Turn], seconds: float) -> dict[str, list[Times]]:
    """The times of a step of every system and round. A system that fails is left out, with all its values."""
    order, values = list(turns), {name: list[Times]() for name in turns}
    deadline = time.monotonic() + seconds
    dice = random.Random(0)
    while time.monotonic() < deadline or any(len(values[name]) < MIN_ROUNDS for name in order):
        dice.shuffle(order)
        for name in list(order):
            try:
                values[name].append(turns[name]())
            except RankError as error:
                print(f"{name} failed: {error}", flush=True)
                order.remove(name)
                del values[name]
    return values


def rows_of(case: str, values: Mapping[str, Sequence[Times]]) -> list[dict[str, Any]]:
    """One row per system: milliseconds per step, shares of the ceilings, and their intervals (95%)."""
    wall = {system: [times.wall for times in rounds] for system, rounds in values.items()}
    cpu = {system: [times.cpu for times in rounds] for system, rounds in values.items()}
    rows = []
    for system in values:
        summary = summarise([1e3 * seconds for seconds in wall[system]])
        rows.append(
            {
                "benchmark": "training_step",
                "case": case,
                "system": system,
                "ms_per_step": round(summary.median, 3),
                "interval": [round(summary.interval.low, 3), round(summary.interval.high, 3)],
                **_share(wall[CEILING], wall[system], "share_of_ceiling", "interval_of_share"),
                **_share(wall[KEPT], wall[system], "share_of_ceiling_memory_kept", "interval_of_share_memory_kept"),
                "cpu_ms_per_step": round(1e3 * summarise(cpu[system]).median, 3),
                **_share(cpu[KEPT], cpu[system], "cpu_share_memory_kept", "interval_of_cpu_share_memory_kept"),
                "raw_ms": [round(1e3 * seconds, 3) for seconds in wall[system]],
                "raw_cpu_ms": [round(1e3 * seconds, 3) for seconds in cpu[system]],
            }
        )
    return rows


def _share(ceiling: Sequence[float], times: Sequence[float], name: str, interval: str) -> dict[str, Any]:
    share = compare_pairs(ceiling, times, METRICS["step_time"])
    return {name: round(share.ratio, 4), interval: [round(share.interval.low, 4), round(share.interval.high, 4)]}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    load_before = os.getloadavg()[0]
    names = ("plain", "plain keeping memory", *options.system)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        everyone = {name: Ranks(name, 2, Path(folder) / name.replace(" ", "-")) for name in names}
        try:
            rows = [row for case in options.case for row in _measure_case(case, everyone, options.seconds)]
        finally:
            for ranks in everyone.values():
                ranks.close()
    if options.out:
        write_json(options.out, _document(rows, load_before))


def _measure_case(case: str, everyone: Mapping[str, Ranks], seconds: float) -> list[dict[str, Any]]:
    turns: dict[str, Turn] = {ALONE: partial(everyone["plain"].run, NUM_STEPS, num_ranks=1)}
    for name, ranks in everyone.items():
        try:
            ranks.load(case)
        except RankError as error:
            print(f"{name} does not train {case}: {error}", flush=True)
        else:
            turns[CEILINGS.get(name, name)] = partial(ranks.run, NUM_STEPS)
    rows = rows_of(case, measure(turns, seconds))
    _print_table(case, rows)
    return rows


def _print_table(case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{case}, {len(rows[0]['raw_ms'])} rounds of {NUM_STEPS} steps; medians and 95% intervals")
    table = [("system", "ms per step", "", "of ceiling", "", "of ceiling, memory kept", "", "cpu ms")]
    for row in rows:
        table.append(
            (
                row["system"],
                f"{row['ms_per_step']:.1f}",
                "{:.1f} to {:.1f}".format(*row["interval"]),
                f"{row['share_of_ceiling']:.1%}",
                "{:.1%} to {:.1%}".format(*row["interval_of_share"]),
                f"{row['share_of_ceiling_memory_kept']:.1%}",
                "{:.1%} to {:.1%}".format(*row["interval_of_share_memory_kept"]),
                f"{row['cpu_ms_per_step']:.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def _document(rows: list[dict[str, Any]], load_before: float) -> dict[str, Any]:
    versions = describe_versions() | {name: _version(name) for name in PACKAGES}
    return {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "load_before": load_before,  # what else the machine did, in processes that ran or wanted to
        "versions": versions,
        "source": describe_source(),
        "rows": rows,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the training step of Weft and its peers on two ranks.")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--system", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seconds", type=float, default=60.0, help="per case, without the start")
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
