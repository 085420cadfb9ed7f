"""How long a run takes to begin: from the command to the first training step, against `python -c "import torch"`.

    python -m benchmarks.start_time

Both take turns, and who begins changes from pair to pair. The first step begins when the log of the run says so: the
moment of the first `StepEnded` less its seconds. Both read compiled Python, as a user's second run does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from weft.atomic import write_json
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions

__all__ = ["main", "measure", "row_of"]

RESULTS = Path(__file__).parent / "results" / "start_time.json"
BAR = 1.5  # seconds more than torch, for the upper bound of the difference
SETTINGS = ["--set", "epochs=1.1", "--quiet"]
CASES = {
    "one process": ["digits_mlp"],
    "two ranks": ["digits_mlp", "--workers", "2"],
    "two workers and a server": ["digits_mlp", "--plan", "data=2 consistency=async topology=server"],
}


def measure(case: str, num_pairs: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of both, pair by pair."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    turns = {
        "torch": lambda i: _time_torch(environment),
        "first_step": lambda i: _time_first_step(CASES[case], folder / f"{case} {i}", environment),
    }
    values = {name: list[float]() for name in turns}
    order = list(turns)
    for i in range(-1, num_pairs):  # the first pair compiles
        for name in order:
            seconds = turns[name](i)
            if i >= 0:
                values[name].append(seconds)
        order.reverse()
    return values


def row_of(case: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, the ratio and the difference over pairs, with their intervals (95%)."""
    ratio = compare_pairs(values["first_step"], values["torch"], METRICS["step_time"])
    pairs = zip(values["first_step"], values["torch"], strict=True)
    more = summarise([first_step - torch for first_step, torch in pairs])
    return {
        "benchmark": "start_time",
        "case": case,
        "num_pairs": more.count,
        **{f"{name}_seconds": round(summarise(seconds).median, 3) for name, seconds in values.items()},
        "ratio": round(ratio.ratio, 3),
        "interval": [round(ratio.interval.low, 3), round(ratio.interval.high, 3)],
        "seconds_more": round(more.median, 3),
        "interval_of_seconds_more": [round(more.interval.low, 3), round(more.interval.high, 3)],
        "is_below_bar": more.interval.high < BAR,
        "raw_seconds": {name: [round(value, 4) for value in seconds] for name, seconds in values.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the start of a run against that of torch.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args(arguments)
    load_before, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="weft-start-") as folder:
        for case in CASES:
            row = row_of(case, measure(case, options.pairs, Path(folder)))
            low, high = row["interval_of_seconds_more"]
            print(f"{case}: torch {row['torch_seconds']} s, and {row['seconds_more']} s more ({low} to {high})")
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


def _time_torch(environment: Mapping[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)
    return time.perf_counter() - begin


def _time_first_step(words: Sequence[str], run: Path, environment: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "weft", "run", *words, *SETTINGS, "--out", str(run)]
    begin = time.time()
    # Exit code 1: so few epochs are not accepted.
    code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    assert code in (0, 1), f"run failed (exit code: {code})"
    with (run / "log.jsonl").open() as log:
        step = next(event for line in log if (event := json.loads(line))["event"] == "StepEnded")
    return float(step["time"] - step["seconds"] - begin)


if __name__ == "__main__":
    main()
