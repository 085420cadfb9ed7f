"""Steps of plans and of DDP's hooks between four hosts, interleaved in rounds.

    python -m benchmarks.compression --rate 1gbit --plan "data=4" --plan "data=4 compress=bf16"
    python -m benchmarks.compression --rate 1gbit --workload lstm --rounds 3 --out benchmarks/results/compression.json
    python -m benchmarks.compression --rate 1gbit --target 0.85 --peer ddp --plan "data=4 compress=bf16"

Every case is a real command on each host: `weft launch --rendezvous` for plans, `python` with torchrun's variables for
the others. Each round starts them all anew, and another is first. Hosts have one thread each, and share the cores of
this machine: `free` says what that leaves.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.compression.cases import PEERS, parse_hook, rows_of
from benchmarks.hosts import RATES, Hosts, can_make_hosts, make_hosts
from weft.atomic import write_json
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.secret import SECRET_VARIABLE, make_secret

__all__ = ["commands_of", "main"]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train.py")
FIRST_PORT = 29500
STEPS = {"100mbit": 4, "1gbit": 10, "10gbit": 20, "unlimited": 20}
TIMEOUT = 3600.0


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
    """What rank 0 found, and the bytes of all ranks."""
    secret = {SECRET_VARIABLE: make_secret().hex()}
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **secret}
    with tempfile.TemporaryDirectory() as folder:
        commands = commands_of(case, hosts[0].address, port, len(hosts), [*words, "--out", folder])
        for host, ended in enumerate(hosts.run_all(commands, variables, timeout=TIMEOUT)):
            if ended.returncode:
                raise RuntimeError(f"{case} failed on host {host}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(len(hosts))]
    found: dict[str, Any] = ranks[0]
    return found | {"of_ranks": ranks[1:]}


def measure_rounds(
    hosts: Hosts, cases: Sequence[str], num_rounds: int, words: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """What is known after each case: for each, what every round found. One that fails is left out from then on."""
    found = dict[str, Any]()
    failed = dict[str, str]()
    ports = count(FIRST_PORT)
    for number in range(num_rounds):
        first = number % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            if case in failed:
                continue
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
    """Write what is known so far, in place of what an earlier run of the same kind found."""
    if options.out is None:
        return
    key = f"{options.workload} {options.rate}" + (f" to {options.target:g}" if options.target else "")
    content = json.loads(options.out.read_text()) if options.out.exists() else {}
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": describe_machine()}
    about |= {"versions": describe_versions(), "source": describe_source(), "load_before": load_before}
    rows = _target_rows(known) if options.target else rows_of(known["rounds"])
    kept = {"hosts": options.hosts, "batch_per_rank": 8, "rows": rows, "failed": known["failed"]}
    write_json(options.out, {**content, key: {**about, **kept}})


def _target_rows(known: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"case": case, **found[0]} for case, found in known["rounds"].items()]


def _show(known: dict[str, Any], options: argparse.Namespace) -> None:
    if options.target:
        for row in _target_rows(known):
            reached = "reached" if row["is_there"] else "not reached"
            about = f"{row['steps']:6} steps {row['train_seconds']:8.1f} s  accuracy {row['accuracy']:.4f} ({reached})"
            print(f"{row['case']:44} {about}")
        return
    print(f"{'case':44} {'s/step':>8} {'MB sent':>8} {'x ddp':>7} {'of free':>8} {'x hook':>7}")
    for row in rows_of(known["rounds"]):
        ratios = ["times_faster_than_ddp", "share_of_free_communication", "times_faster_than_best_hook"]
        shown = [f"{row[name]:.2f}" if row[name] else "-" for name in ratios]
        sent = row["sent_bytes_per_step"] / 1e6
        print(f"{row['case']:44} {row['seconds_per_step']:8.4f} {sent:8.2f} {shown[0]:>7} {shown[1]:>8} {shown[2]:>7}")


if __name__ == "__main__":
    main()
