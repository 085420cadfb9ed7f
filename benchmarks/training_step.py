"""The training step on two ranks: Weft and its peers, interleaved in one run, against ranks that do not talk.

    python -m benchmarks.training_step [--case mlp] [--seconds 60] [--system weft]

Every system has its two processes, of one thread each; they sleep but for their turn. A round gives each system a few
steps, in a random order. The ceiling is two ranks that train at the same time and never talk: what two busy cores leave
of one rank's speed. A share of the ceiling is the median over rounds of ceiling / system.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.steps.ranks import RankError, Ranks
from weft.atomic import write_json
from weft.metrics.comparison import compare_pairs
from weft.metrics.machine import describe_machine, describe_source, describe_versions
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise

__all__ = ["main", "measure", "rows_of"]

RESULTS = Path(__file__).parent / "results" / "training_step.json"
CASES = ("mlp", "resnet20", "gpt")
PEERS = ("weft", "ddp gloo", "ddp weft", "fabric", "accelerate", "deepspeed")
PACKAGES = ("lightning-fabric", "accelerate", "deepspeed")
ALONE, CEILING = "one rank alone", "ceiling"
MIN_ROUNDS = 6  # an interval of the median needs as many values
NUM_STEPS = 4

Turn = Callable[[], float]


def measure(turns: Mapping[str, Turn], seconds: float) -> dict[str, list[float]]:
    """Seconds per step of every system and round. A system that fails is left out from then on, with all its values."""
    order, values = list(turns), {name: list[float]() for name in turns}
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


def rows_of(case: str, values: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row per system: milliseconds per step, share of the ceiling, and the intervals of both (95%)."""
    rows = []
    for system, seconds in values.items():
        times = summarise([1e3 * value for value in seconds])
        share = compare_pairs(values[CEILING], seconds, METRICS["step_time"])
        rows.append(
            {
                "benchmark": "training_step",
                "case": case,
                "system": system,
                "ms_per_step": round(times.median, 3),
                "interval": [round(times.interval.low, 3), round(times.interval.high, 3)],
                "share_of_ceiling": round(share.ratio, 4),
                "interval_of_share": [round(share.interval.low, 4), round(share.interval.high, 4)],
                "raw_ms": [round(1e3 * value, 3) for value in seconds],
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        everyone = {name: Ranks(name, 2, Path(folder) / name.replace(" ", "-")) for name in ("plain", *options.system)}
        try:
            rows = [row for case in options.case for row in _measure_case(case, everyone, options.seconds)]
        finally:
            for ranks in everyone.values():
                ranks.close()
    if options.out:
        write_json(options.out, _document(rows))


def _measure_case(case: str, everyone: Mapping[str, Ranks], seconds: float) -> list[dict[str, Any]]:
    plain = everyone["plain"]
    turns: dict[str, Turn] = {ALONE: lambda: plain.run(NUM_STEPS, 1), CEILING: lambda: plain.run(NUM_STEPS)}
    for name, ranks in everyone.items():
        try:
            ranks.load(case)
        except RankError as error:
            print(f"{name} does not train {case}: {error}", flush=True)
            continue
        if name != "plain":
            turns[name] = lambda ranks=ranks: ranks.run(NUM_STEPS)  # type: ignore[misc]
    rows = rows_of(case, measure(turns, seconds))
    _print_table(case, rows)
    return rows


def _print_table(case: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(f"\n{case}, {len(rows[0]['raw_ms'])} rounds of {NUM_STEPS} steps")
    print(f"{'system':<16}{'ms per step':>12}{'95% interval':>22}{'share of ceiling':>18}{'95% interval':>18}")
    for row in rows:
        times, shares = row["interval"], row["interval_of_share"]
        print(
            f"{row['system']:<16}{row['ms_per_step']:>12.2f}{times[0]:>13.2f} to{times[1]:>6.2f}"
            f"{row['share_of_ceiling']:>18.1%}{shares[0]:>10.1%} to {shares[1]:.1%}",
            flush=True,
        )


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    versions = describe_versions() | {name: _version(name) for name in PACKAGES}
    return {
        "date": date.today().isoformat(),
        "machine": describe_machine(),
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
