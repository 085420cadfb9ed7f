"""Kernels of gradient compression: how long each takes beside plain passes over the same memory, on one thread.

    python -m benchmarks.compression_kernels [--elements 25000000] [--out benchmarks/results/compression_kernels.json]

All take turns in one process, in a random order, and ratios are taken within rounds. `mul_` is `x.mul_(c)`, which reads
and writes the tensor once; `memcpy` copies the streams that a merge reads. Freed memory is kept, as in Weft's runs.
Speeds are in bytes of the dense float32 tensor, or of the sparse streams that go in, per second.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.atomic import write_json
from weft.distributed.codecs import kernels
from weft.metrics.timing import InterleavedTimings, TimingRule, time_interleaved
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.training.process import keep_freed_memory

__all__ = ["BARS", "Case", "cases_of", "main", "rows_of"]

RESULTS = Path(__file__).parent / "results" / "compression_kernels.json"
BLOCK = 512
SHARE = 0.01
BARS = {"select": ("times", 3.0), "quantise 4 bits": ("GB/s", 1.0), "dequantise 4 bits": ("GB/s", 1.0)}
"""At most so many times the reference, or at least so many GB/s; for the bound of the interval that is worse."""


@dataclass(frozen=True)
class Case:
    """A call, the bytes that it is said to go through, and the case that it is held against."""

    call: Callable[[], object]
    num_bytes: int
    reference: str = "mul_"


def cases_of(num: int) -> dict[str, Case]:
    """The kernels on normal numbers: `num` of them, and sparse streams of 1% and 10%."""
    generator = torch.Generator().manual_seed(0)
    x, message = (torch.randn(num, generator=generator) for _ in range(2))
    out, velocity = torch.zeros(num), torch.zeros(num)
    wanted = max(1, int(SHARE * num))
    dense = {
        "mul_": lambda: x.mul_(-1.0),
        "copy": lambda: out.copy_(x),
        "torch.topk": lambda: x.abs().topk(wanted, sorted=False),
        "select": lambda: kernels.add_and_select(x, None, 1.0, wanted),
        "add and select": lambda: kernels.add_and_select(x, message, 1e-9, wanted),
        "add with momentum and select": lambda: kernels.add_and_select(
            x, message, 1e-9, wanted, velocity=velocity, momentum=0.9
        ),
        "select above": lambda: kernels.add_and_select_above(x, None, 1.0, 2.576),
        "add": lambda: kernels.add(out, message, 1e-9),
    }
    found = {name: Case(call, 4 * num) for name, call in {**dense, **_quantised(x, out)}.items()}
    for share in (SHARE, 10 * SHARE):
        found |= _sparse(x, message, out, max(1, int(share * num)), f"{100 * share:g}%")
    return found


def _quantised(x: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    key, norms = kernels.derive_key(1), kernels.block_norms(x, BLOCK, "l2")
    calls: dict[str, Callable[[], object]] = {"block norms": lambda: kernels.block_norms(x, BLOCK, "l2")}
    for bits in (2, 4, 8):
        codes = kernels.quantise(x, norms, BLOCK, bits, key)
        calls[f"quantise {bits} bits"] = lambda bits=bits: kernels.quantise(x, norms, BLOCK, bits, key)  # type: ignore[misc]
        calls[f"dequantise {bits} bits"] = lambda bits=bits, codes=codes: kernels.dequantise(  # type: ignore[misc]
            codes, norms, BLOCK, bits, out
        )
    signs, scales = kernels.encode_signs(x.clone(), BLOCK)
    rest = x.clone()
    calls["encode signs"] = lambda: kernels.encode_signs(rest, BLOCK)
    calls["decode signs"] = lambda: kernels.decode_signs(signs, scales, BLOCK, out)
    return calls


def _sparse(x: Tensor, message: Tensor, out: Tensor, wanted: int, share: str) -> dict[str, Case]:
    (a, values_a), (b, values_b) = (_stream(one, wanted) for one in (x, message))
    copies = [torch.empty_like(one) for one in (a, values_a, b, values_b)]

    def copy_streams() -> None:
        for into, one in zip(copies, (a, values_a, b, values_b), strict=True):
            into.copy_(one)

    memcpy = f"memcpy of streams of {share}"
    return {
        memcpy: Case(copy_streams, 16 * wanted, memcpy),
        f"merge of {share}": Case(lambda: kernels.merge(a, values_a, b, values_b), 16 * wanted, memcpy),
        f"scatter_add of {share}": Case(lambda: kernels.scatter_add(out, a, values_a), 8 * wanted, memcpy),
    }


def _stream(x: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    places = kernels.add_and_select(x, None, 1.0, wanted)
    return places, x[places.long()]


def rows_of(cases: Mapping[str, Case], timings: InterleavedTimings) -> list[dict[str, Any]]:
    """Milliseconds, GB/s and times the reference of every case, with intervals (95%), and whether it meets its bar."""
    rows = []
    for name, case in cases.items():
        summary = timings.timings[name].summary
        ratio = timings.speed_up(case.reference, name)  # how many times faster the reference is
        speeds = [case.num_bytes / 1e9 / seconds for seconds in (summary.interval.high, summary.interval.low)]
        row: dict[str, Any] = {
            "benchmark": "compression_kernels",
            "case": name,
            "ms": round(1e3 * summary.median, 3),
            "GB/s": round(case.num_bytes / 1e9 / summary.median, 2),
            "interval_of_speed": [round(speed, 2) for speed in speeds],
            "reference": case.reference,
            "times_the_reference": round(ratio.ratio, 3),
            "interval_of_times": [round(ratio.interval.low, 3), round(ratio.interval.high, 3)],
        }
        if name in BARS:
            what, bar = BARS[name]
            worse = ratio.interval.high <= bar if what == "times" else speeds[0] >= bar
            row["meets_bar"] = bool(worse)
        row["raw_ms"] = [round(1e3 * value, 4) for value in timings.timings[name].steady]
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the kernels of gradient compression.")
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    load_before, cases = os.getloadavg()[0], cases_of(options.elements)
    rule = TimingRule(relative_width=0.01, max_seconds=300.0, max_count=options.rounds)
    rows = rows_of(cases, time_interleaved({name: case.call for name, case in cases.items()}, rule=rule))
    for row in rows:
        low, high = row["interval_of_times"]
        verdict = {True: "  meets its bar", False: "  MISSES ITS BAR", None: ""}[row.get("meets_bar")]
        print(
            f"{row['case']:30} {row['ms']:9.3f} ms {row['GB/s']:7.2f} GB/s, {row['times_the_reference']:.2f} times "
            f"{row['reference']} ({low:.2f} to {high:.2f}){verdict}",
            flush=True,
        )
    if options.out:
        write_json(
            options.out,
            {
                "date": date.today().isoformat(),
                "machine": describe_machine(),
                "load_before": load_before,  # what else the machine did, in processes that ran or wanted to
                "versions": describe_versions(),
                "source": describe_source(),
                "elements": options.elements,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
