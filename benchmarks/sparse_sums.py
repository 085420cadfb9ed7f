"""Sparse sums against a dense all-reduce on the virtual cluster: real bytes, virtual time, at 1 Gbit/s.

    python -m benchmarks.sparse_sums [--ranks 4 8 16 32 64] [--length 131072]
        [--out benchmarks/results/sparse_sums.json]

Every rank has entries at random places, or all ranks have theirs at the same ones, of a density from 0.0001 to 0.3. The
dense all-reduce is the fastest of Weft's own for that message on that network. Virtual time is that of messages alone:
additions are free, so it is the same on every machine and in every run, and has no interval. The choice is made before
anything is sent, from the length, the density, the number of ranks, latency and bandwidth, as if supports were random;
of identical ones from the entries of the sum, as after a first step.

A gather of large streams by many ranks, which needs more memory than this machine should give to it, is left out: it is
never near to the fastest.

The file has all rows in `raw_rows`, and in `rows` those that docs/measured.md shows: some numbers of ranks and
densities, and every choice that was not the fastest.
"""

import argparse
from collections.abc import Generator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from weft.atomic import write_json
from weft.distributed.codecs import ReductionWork
from weft.distributed.codecs.sparse_sums import (
    INDEX_TYPE,
    SPARSE_ALGORITHMS,
    SparseAlgorithm,
    SparseStream,
    Supports,
    choose_algorithm,
    sum_sparse,
)
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import Call
from weft.distributed.virtual import VirtualResult, run_virtual
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.report.table import aligned

__all__ = ["main", "measure"]

RESULTS = Path(__file__).parent / "results" / "sparse_sums.json"
GIGABIT = Link(alpha=1e-4, beta=8e-9)
RANKS = (4, 8, 16, 32, 64)
DENSITIES = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
LENGTH = 1 << 17
MOST_BYTES = 3e9
SHOWN_RANKS, SHOWN_DENSITIES = (4, 16, 64), (0.001, 0.01, 0.1, 0.3)
CHOSEN_TO_FASTEST, DENSE_TO_CHOSEN = "chosen / fastest", "dense / chosen"

Kind = Literal["random", "identical"]
KINDS: tuple[Kind, ...] = ("random", "identical")


def make_streams(kind: Kind, size: int, length: int, num_entries: int) -> list[SparseStream]:
    streams = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank if kind == "random" else 0)
        indices = torch.randperm(length, generator=generator)[:num_entries].sort().values
        streams.append(SparseStream(length, torch.ones(num_entries), indices.to(INDEX_TYPE)))
    return streams


def run_sparse(streams: Sequence[SparseStream], by: SparseAlgorithm) -> VirtualResult:
    def program(group: AbstractGroup) -> float:
        def dense() -> Generator[Call | tuple[Call, ...], None, Tensor]:
            total = yield from sum_sparse(group.rank, group.size, streams[group.rank], by)
            return total.to_dense()

        return float(ReductionWork(group, dense()).wait().sum())

    return run_virtual(program, len(streams), network=NetworkModel(GIGABIT))


def run_dense(streams: Sequence[SparseStream]) -> VirtualResult:
    def program(group: AbstractGroup) -> float:
        total = streams[group.rank].to_dense().clone()
        group.all_reduce(total)
        return float(total.sum())

    return run_virtual(program, len(streams), network=NetworkModel(GIGABIT))


def measure(kind: Kind, size: int, length: int, density: float) -> dict[str, Any]:
    """One row: milliseconds and, raw, the bytes of the busiest rank, by algorithm; which was chosen."""
    num_entries = max(round(density * length), 1)
    streams = make_streams(kind, size, length, num_entries)
    results = {"dense": run_dense(streams)}
    for by in SPARSE_ALGORITHMS:
        gathered = size * (size - 1) * min(8 * num_entries, 4 * length)
        if by != "gather" or gathered <= MOST_BYTES:
            results[by] = run_sparse(streams, by)
    sums = {total for result in results.values() for total in result.results}
    assert sums == {float(size * num_entries)}, f"sums differ ({sums})"
    milliseconds = {by: 1e3 * max(result.seconds) for by, result in results.items()}
    supports = Supports(length, num_entries)
    if kind == "identical":
        supports = Supports.measured(length, num_entries, num_entries, size)
    chosen = choose_algorithm(size, supports, GIGABIT)
    fastest = min(SPARSE_ALGORITHMS, key=lambda by: milliseconds.get(by, float("inf")))
    return {
        "places": kind,
        "ranks": size,
        "length": length,
        "density": density,
        **{f"{by}, ms": value for by, value in milliseconds.items()},
        "fastest": fastest,
        "chosen": chosen,
        CHOSEN_TO_FASTEST: milliseconds[chosen] / milliseconds[fastest],
        DENSE_TO_CHOSEN: milliseconds["dense"] / milliseconds[chosen],
        "raw_bytes": {by: max(result.bytes_sent) for by, result in results.items()},
    }


def cells(row: dict[str, Any]) -> list[str]:
    times = [row.get(f"{by}, ms") for by in ("dense", *SPARSE_ALGORITHMS)]
    return [
        str(row["ranks"]),
        f"{row['density']:g}",
        *("-" if time is None else f"{time:.2f}" for time in times),
        row["chosen"],
        f"{row[CHOSEN_TO_FASTEST]:.2f}",
        f"{row[DENSE_TO_CHOSEN]:.1f}",
    ]


def is_shown(row: dict[str, Any]) -> bool:
    is_missed = row["chosen"] != row["fastest"]
    return is_missed or (row["ranks"] in SHOWN_RANKS and row["density"] in SHOWN_DENSITIES)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    console, rows = Console(highlight=False), []
    headers = ("ranks", "density", "dense", *SPARSE_ALGORITHMS, "chosen", CHOSEN_TO_FASTEST, DENSE_TO_CHOSEN)
    for kind in KINDS:
        own = [measure(kind, size, options.length, density) for size in options.ranks for density in DENSITIES]
        rows += own
        console.print(f"\n{kind} places, {options.length} float32, milliseconds")
        for line in aligned("rr" + "r" * 5 + "lrr", [cells(row) for row in own], headers):
            console.print(line, crop=False, soft_wrap=True)
    worst = max(row[CHOSEN_TO_FASTEST] for row in rows)
    console.print(f"\nthe chosen sum takes at most {worst:.3f} times as long as the fastest one")
    if options.out:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": describe_versions(),
            "source": describe_source(),
            "link": {"alpha": GIGABIT.alpha, "beta": GIGABIT.beta},
            "rows": [row for row in rows if is_shown(row)],
            "raw_rows": rows,
        }
        write_json(options.out, document)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold sparse sums against a dense all-reduce on virtual ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
