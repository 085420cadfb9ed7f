"""All-reduce between processes of one machine: Weft, Gloo and OpenMPI, interleaved in one run, and the memory's limit.

    python benchmarks/all_reduce.py                 # 2, 4 and 8 ranks; a table, and results/all_reduce.json
    python benchmarks/all_reduce.py --ranks 2

Every rank is one process with one thread, started by mpirun, and holds all systems at once; each round runs every
system once, in turn. A value is the time of the slowest rank. `weft (torch)` and `gloo` are the same torch.distributed
call; `weft` and `openmpi` are called directly, on ordinary memory; `weft (empty)` on a tensor of `group.empty()`.

The limits are what the memory allows, measured in the same rounds on all ranks at once: `limit` reads and writes the
message once, in place; `limit (staged)` also passes it through a buffer that stays in the cache, which is what a
message in private memory costs at least.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from weft.atomic import write_json
from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.distributed.torch_backend import register
from weft.metrics.statistics import ratio_interval, ratio_of_medians, summarise
from weft.records.machine import describe_machine, describe_versions
from weft.report.table import aligned

RESULT = Path(__file__).parent / "results" / "all_reduce.json"
SIZES = {"10 kB": 10_000, "16 MB": 16_000_000, "100 MB": 100_000_000}
CHUNK = 64 * 1024  # elements of the staged limit: 256 kB
WARM_UP = 2
# Rounds and calls per round, by message: a round of small messages is a batch.
ROUNDS = {2: {"10 kB": (40, 25), "16 MB": (40, 1), "100 MB": (25, 1)}}
FEW_ROUNDS = {"10 kB": (20, 10), "16 MB": (12, 1), "100 MB": (8, 1)}
PAIRS = (
    ("gloo", "weft (torch)"),
    ("openmpi", "weft"),
    ("openmpi", "weft (empty)"),
    ("weft (empty)", "limit"),
    ("weft", "limit (staged)"),
)

Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rendezvous", type=Path, help="for the ranks themselves, which mpirun starts")
    arguments = parser.parse_args()
    if arguments.rendezvous is not None:
        return run_rank(arguments.rendezvous)
    runs = {num_ranks: start_ranks(num_ranks) for num_ranks in arguments.ranks}
    print_tables(runs)
    write_json(
        arguments.out,
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "rows": [row_of(num_ranks, message, runs[num_ranks][message]) for num_ranks in runs for message in SIZES],
            "seconds": {str(num_ranks): values for num_ranks, values in runs.items()},
        },
    )
    return None


def start_ranks(num_ranks: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by message and system."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    with tempfile.TemporaryDirectory() as folder:
        command = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]
        ranks = [sys.executable, __file__, "--rendezvous", folder]
        subprocess.run(
            [*command, *ranks], check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr
        )
        values: dict[str, dict[str, list[float]]] = json.loads((Path(folder) / "values.json").read_text())
    return values


def run_rank(folder: Path) -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    weft_backend = dist.new_group(backend="weft")
    group = SharedMemoryGroup(folder, rank, size)
    values = {}
    for message, num_bytes in SIZES.items():
        steps = build_steps(num_bytes // 4, group, weft_backend, world, MPI)
        num_rounds, num_calls = ROUNDS.get(size, FEW_ROUNDS)[message]
        values[message] = time_rounds(steps, group, num_rounds, num_calls)
    if rank == 0:
        write_json(folder / "values.json", values)
    group.close()
    dist.destroy_process_group()


def build_steps(length: int, group: SharedMemoryGroup, weft_backend: Any, world: Any, mpi: Any) -> dict[str, Step]:
    """Each system has a tensor of its own, so that none finds the message in the cache."""
    names = ("gloo", "weft (torch)", "openmpi", "weft", "limit", "limit (staged)")
    private = {name: torch.zeros(length) for name in names}
    shared, array, buffer = group.empty((length,)).zero_(), private["openmpi"].numpy(), torch.zeros(CHUNK)
    return {
        "gloo": lambda: dist.all_reduce(private["gloo"]),
        "weft (torch)": lambda: dist.all_reduce(private["weft (torch)"], group=weft_backend),
        "openmpi": lambda: world.Allreduce(mpi.IN_PLACE, array),
        "weft": lambda: group.all_reduce(private["weft"]),
        "weft (empty)": lambda: group.all_reduce(shared),
        "limit": lambda: private["limit"].add_(1.0),
        "limit (staged)": lambda: add_through(private["limit (staged)"], buffer),
    }


def add_through(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    for chunk in tensor.split(CHUNK):
        staged = buffer[: len(chunk)]
        staged.copy_(chunk)
        chunk.add_(staged)


def time_rounds(
    steps: dict[str, Step], group: SharedMemoryGroup, num_rounds: int, num_calls: int
) -> dict[str, list[float]]:
    seconds = np.empty((WARM_UP + num_rounds, len(steps)))
    for row in seconds:
        for index, step in enumerate(steps.values()):
            group.barrier()
            begin = time.perf_counter()
            for _ in range(num_calls):
                step()
            row[index] = (time.perf_counter() - begin) / num_calls
    slowest = torch.from_numpy(seconds[WARM_UP:].copy())
    group.all_reduce(slowest, "max")
    return {name: slowest[:, index].tolist() for index, name in enumerate(steps)}


def row_of(num_ranks: int, message: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What the README shows of one message: medians in milliseconds, and the ratios to the peers and to the limit."""
    row: dict[str, Any] = {"benchmark": "all_reduce", "ranks": num_ranks, "message": message}
    for system in ("weft (torch)", "gloo", "weft", "openmpi"):
        row[f"{system}, ms"] = 1e3 * summarise(seconds[system]).median
    for slow, fast in (("gloo", "weft (torch)"), ("openmpi", "weft"), ("limit", "weft (empty)")):
        interval = ratio_interval(seconds[slow], seconds[fast])
        row[f"{slow} / {fast}"] = ratio_of_medians(seconds[slow], seconds[fast])
        row[f"interval_of_{slow} / {fast}"] = [interval.low, interval.high]
    return row


def print_tables(runs: dict[int, dict[str, dict[str, list[float]]]]) -> None:
    console = Console(highlight=False)
    for num_ranks, messages in runs.items():
        console.print(f"\n{num_ranks} ranks: milliseconds, median and 95% interval")
        systems = list(next(iter(messages.values())))
        rows = [[system, *(_cell(messages[message][system]) for message in messages)] for system in systems]
        ratios = [
            [f"{slow} / {fast}", *(_ratio(messages[message][slow], messages[message][fast]) for message in messages)]
            for slow, fast in PAIRS
        ]
        for line in aligned("l" + "r" * len(messages), [*rows, *ratios], ("", *messages)):
            console.print(line, crop=False, no_wrap=True)


def _cell(seconds: list[float]) -> str:
    summary = summarise([1e3 * value for value in seconds])
    return f"{summary.median:.4g} ({summary.interval})"


def _ratio(slow: list[float], fast: list[float]) -> str:
    return f"{ratio_of_medians(slow, fast):.2f} ({ratio_interval(slow, fast)})"


if __name__ == "__main__":
    main()
