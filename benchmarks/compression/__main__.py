"""Steps of plans and of DDP's hooks between four hosts, interleaved in rounds.

    python -m benchmarks.compression --rate 1gbit --plan "data=4" --plan "data=4 compress=bf16"
    python -m benchmarks.compression --rate 1gbit --workload lstm --rounds 3 --out benchmarks/results/compression.json
    python -m benchmarks.compression --rate unlimited --target 0.85 --peer ddp --plan "data=4 compress=bf16"

The last trains to a test accuracy: how many steps that takes hangs on no link, and times the step is the time it takes.

Every case is a real command on each host: `weft launch --rendezvous` for plans, `python` with torchrun's variables for
the others. Each round starts them all anew, and another is first. Hosts have one thread each, and share the cores of
this machine: `free` says what that leaves.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.compression.cases import PEERS, parse_hook, rows_of
from benchmarks.compression.workloads import BATCH_PER_RANK
from benchmarks.hosts import RATES, Hosts, can_make_hosts, make_hosts
from weft.atomic import write_json
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.secret import SECRET_VARIABLE, make_secret

__all__ = ["commands_of", "main", "target_row"]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train.py")
FIRST_PORT = 29500
STEPS = {"100mbit": 4, "1gbit": 10, "10gbit": 20, "unlimited": 20}
TIMEOUT = {False: 240.0, True: 3600.0}
"""Seconds of a case, by whether it trains to a target."""


def commands_of(case: str, address: str, port: int, num_hosts: int, words: Sequence[str]) -> list[list[str]]:
    """The command of each host."""
    script = [str(SCRIPT), "--case", case, *words]
    if case == "free" or parse_hook(case) is not None:
        common = {"WORLD_SIZE": num_hosts, "MASTER_ADDR": address, "MASTER_PORT": port, "LOCAL_RANK": 0}
        shared = [f"{name}={value}" for name, value in common.items()] + ["GLOO_SOCKET_IFNAME=eth0"]
        return [["env", f"RANK={host}", *shared, sys.executable, *script] for host in range(num_hosts)]
    launch = [sys.executable, "-m", "weft", "launch", "--rendezvous", f"{address}:{port}", "--plan", case]
    return [[*launch, "--num-hosts", str(num_hosts), "--host-rank", str(h), *script] for h in range(num_hosts)]


def measure(hosts: Hosts, case: str, port: int, words: Sequence[str]) -> dict[str, Any]:
    """What rank 0 found, and the bytes of all ranks.

    Raises:
        RuntimeError: a rank failed, or was late.
    """
    secret = {SECRET_VARIABLE: make_secret().hex()}
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **secret}
    with tempfile.TemporaryDirectory() as folder:
        commands = commands_of(case, hosts[0].address, port, len(hosts), [*words, "--out", folder])
        try:
            all_ended = hosts.run_all(commands, variables, timeout=TIMEOUT["--target" in words])
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{case} was not done after {error.timeout:g} s") from None
        for host, ended in enumerate(all_ended):
            if ended.returncode:
                raise RuntimeError(f"{case} failed on host {host}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(len(hosts))]
    found: dict[str, Any] = ranks[0]
    return found | {"of_ranks": ranks[1:]}


def measure_rounds(
    hosts: Hosts, cases: Sequence[str], num_rounds: int, words: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What is known after each case: for each, what every round found. One that fails is tried again in the next."""
    found = dict[str, Any]()
    failed = dict[str, str]()
    ports = count(FIRST_PORT)
    for number in range(num_rounds):
        first = number % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            began = time.monotonic()
            try:
                found.setdefault(case, []).append(measure(hosts, case, next(ports), words))
                print(f"round {number}: {case}, {time.monotonic() - began:.0f} s in all", file=sys.stderr, flush=True)
            except RuntimeError as error:
                failed[case] = str(error)
                print(error, file=sys.stderr, flush=True)
            yield {"rounds": {name: values for name, values in found.items() if values}, "failed": failed}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", choices=list(RATES), default="1gbit")
    parser.add_argument("--workload", choices=["mlp", "lstm"], default="mlp")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--plan", action="append", default=[], help="a plan of Weft; several may be given")
    parser.add_argument("--peer", action="append", help=f"instead of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed in each round; with --target, at most so many")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before, of which none is timed")
    parser.add_argument("--target", type=float, help="train to this test accuracy instead, once")
    parser.add_argument("--evaluate-every", type=int, default=50, help="steps, with --target")
    parser.add_argument("--samples", type=int, help="of the training data; all with --target")
    parser.add_argument("--out", type=Path, help="write the results here, beside those of other rates and workloads")
    options = parser.parse_args(arguments)
    if reason := can_make_hosts():
        sys.exit(f"no test hosts: {reason}")
    cases = [*(PEERS if options.peer is None else options.peer), *options.plan]
    words = ["--workload", options.workload, "--warm-up", str(options.warm_up)]
    load_before = os.getloadavg()[0]
    if options.target is None:
        words += ["--steps", str(options.steps or STEPS[options.rate]), "--samples", str(options.samples or 4000)]
    else:
        words += ["--steps", str(options.steps or 3000), "--samples", str(options.samples or 55000)]
        words += ["--target", str(options.target), "--evaluate-every", str(options.evaluate_every)]
    with make_hosts(options.hosts, options.rate) as hosts:
        for known in measure_rounds(hosts, cases, 1 if options.target else options.rounds, words):
            _keep(known, options, load_before)
    _show(known, options)


def _keep(known: dict[str, Any], options: argparse.Namespace, load_before: float) -> None:
    """Write what is known so far, in place of what an earlier run found of the same workload and link."""
    if options.out is None:
        return
    rows = _rows(known, options)
    before = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    kept = [row for row in before if (row["workload"], row["link"]) != (options.workload, options.rate)]
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    about |= {"versions": describe_versions(), "source": describe_source(), "load_before": load_before}
    about |= {"hosts": options.hosts, "batch_per_rank": BATCH_PER_RANK, "failed": known["failed"]}
    ordered = sorted([*kept, *rows], key=lambda row: (row["workload"] != "mlp", list(RATES).index(row["link"])))
    write_json(options.out, {**about, "rows": ordered})


def _rows(known: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.target is None:
        return rows_of(options.workload, options.rate, known["rounds"])
    about = {"workload": options.workload, "link": options.rate}
    return [target_row({**about, "case": case}, options.target, found[0]) for case, found in known["rounds"].items()]


def target_row(about: dict[str, Any], target: float, found: dict[str, Any]) -> dict[str, Any]:
    """Steps that a case took to the target, evaluated every so often; none where it did not get there."""
    steps = found["steps"] if found["is_there"] else None
    row = {**about, "test accuracy to reach": target, "steps": steps, "samples": None}
    if steps is not None:
        row["samples"] = steps * BATCH_PER_RANK * (1 + len(found["of_ranks"]))
    return {**row, "accuracy then": found["accuracy"], "raw_curve": found["curve"]}


def _show(known: dict[str, Any], options: argparse.Namespace) -> None:
    for row in _rows(known, options):
        numbers = {key: value for key, value in row.items() if isinstance(value, float | int)}
        print(f"{row['case']:44}", ", ".join(f"{key}: {value:.4g}" for key, value in numbers.items()))


if __name__ == "__main__":
    main()
