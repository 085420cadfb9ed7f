"""Layers split over two ranks: Weft's against DTensor, over Gloo as users have it and over the backend "weft".

    python -m benchmarks.placement.tensor [--rounds 12] [--out benchmarks/results/tensor.json]

Two ranks of one thread each, forward and backward of the same module with the same weights and inputs, split alike
(columns, then rows). All three are in the same two processes and take turns, a few steps each, in an order that changes
from round to round; the time is that of the slower rank. The outputs and gradients of all are compared first.

    mlp           512-2048-512, twice, 32 samples         one all-reduce forward and one backward for each pair
    wide mlp      1024-4096-1024, twice, 64 samples       eight times the products for four times the bytes
    attention     8 heads of 64, 4 sequences of 128       queries, keys, values apart
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.atomic import write_json
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor import TensorParallel
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.training.placement import WholeModel
from weft.training.process import keep_freed_memory

__all__ = ["main", "measure_rank", "row_of"]

RESULTS = Path(__file__).parent.parent / "results" / "tensor.json"
NUM_RANKS, NUM_STEPS, MIN_ROUNDS = 2, 5, 6
PEERS = ("DTensor over gloo", "DTensor over weft")
BARS = {"DTensor over gloo": 1.3, "DTensor over weft": 1.0}


class Attention(nn.Module):
    """[batch, length, 512] -> the same; as many heads as there are queries for."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 64)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def mlp(width: int) -> nn.Module:
    sizes = [(width, 4 * width), (4 * width, width)] * 2
    return nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.GELU())))


PAIRS = {"0": "column", "2": "row", "4": "column", "6": "row"}
CASES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], Mapping[str, str]]] = {
    "mlp": (lambda: mlp(512), (32, 512), PAIRS),
    "wide mlp": (lambda: mlp(1024), (64, 1024), PAIRS),
    "attention": (Attention, (4, 128, 512), {"q": "column", "k": "column", "v": "column", "o": "row"}),
}


def measure_rank(num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """The rank program: seconds per step by case and system, round by round."""
    import torch.distributed as dist

    from weft.distributed.torch_backend import register

    torch.set_num_threads(1)
    keep_freed_memory()
    group = open_group(find_launch(), "shared_memory")
    register()
    store = f"file://{os.environ['WEFT_MEETING']}/peers"
    dist.init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    groups = {"DTensor over gloo": dist.group.WORLD, "DTensor over weft": dist.new_group(backend="weft")}
    try:
        return {case: _measure(case, group, groups, num_rounds) for case in CASES}
    finally:
        dist.destroy_process_group()
        group.close()


def _measure(case: str, group: AbstractGroup, peers: Mapping[str, Any], num_rounds: int) -> dict[str, list[float]]:
    make, shape, rules = CASES[case]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    models = {"weft": _build(make)} | {name: _build(make) for name in peers}
    TensorParallel(group, group, WholeModel(), rules=Rules(tuple(rules.items()))).place(models["weft"])
    for name, peer in peers.items():
        _parallelize(models[name], peer, rules)
    found = {name: _step(model, x) for name, model in models.items()}
    for name in peers:
        torch.testing.assert_close(found[name], found["weft"], rtol=1e-4, atol=1e-5)
    values = {name: list[float]() for name in models}
    for round_ in range(num_rounds):
        order = list(models)[round_ % 3 :] + list(models)[: round_ % 3]
        for name in order:
            _step(models[name], x)
            group.barrier()
            began = time.perf_counter()
            for _ in range(NUM_STEPS):
                _step(models[name], x)
            values[name].append((time.perf_counter() - began) / NUM_STEPS)
    return values


def _build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def _parallelize(model: nn.Module, peer: Any, rules: Mapping[str, str]) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    parallelize_module(
        model, DeviceMesh.from_group(peer, "cpu"), {name: styles[word]() for name, word in rules.items()}
    )


def _step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of the inputs."""
    for parameter in model.parameters():
        parameter.grad = None
    inputs = x.detach().requires_grad_()
    y = model(inputs)
    y.square().mean().backward()
    assert inputs.grad is not None, "inputs have a gradient"
    return y.detach(), inputs.grad


def row_of(case: str, ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Medians of the slower rank, and how many times as fast as each peer Weft is, with the interval (95%)."""
    values = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}
    row: dict[str, Any] = {"benchmark": "tensor", "case": case, "ranks": NUM_RANKS}
    for name, seconds in values.items():
        summary = summarise([1e3 * value for value in seconds])
        row[f"{name}, ms"] = [round(x, 3) for x in (summary.median, summary.interval.low, summary.interval.high)]
    for name in PEERS:
        ratio = compare_pairs(values[name], values["weft"], METRICS["step_time"])
        bounds = [round(ratio.interval.low, 3), round(ratio.interval.high, 3)]
        row[f"{name} / weft"] = {"ratio": round(ratio.ratio, 3), "interval": bounds, "bar": BARS[name]}
    row["raw_ms"] = {name: [round(1e3 * value, 4) for value in seconds] for name, seconds in values.items()}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time split layers against DTensor.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    given = {"num_rounds": max(MIN_ROUNDS, options.rounds)}
    ranks = run_ranks(RankProgram("benchmarks.placement.tensor:measure_rank", given), NUM_RANKS)
    rows = [row_of(case, [rank[case] for rank in ranks]) for case in CASES]
    for row in rows:
        print(f"{row['case']}: weft {row['weft, ms'][0]:.2f} ms")
        for name in PEERS:
            found = row[f"{name} / weft"]
            low, high = found["interval"]
            print(f"  {name}: {row[f'{name}, ms'][0]:.2f} ms, {found['ratio']:.2f} times ({low:.2f} to {high:.2f})")
    if options.out:
        about = {"date": date.today().isoformat(), "machine": describe_machine(), "load_before": load_before}
        versions = {"versions": describe_versions(), "source": describe_source()}
        write_json(options.out, {**about, **versions, "rows": rows})


if __name__ == "__main__":
    main()
