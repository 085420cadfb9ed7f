"""Layers split over two ranks: Weft's against DTensor, over Gloo as users have it and over the backend "weft".

    python -m benchmarks.placement.tensor [--rounds 20] [--out benchmarks/results/tensor.json]

Two ranks of one thread each, forward and backward of the same module with the same weights and inputs, split alike
(columns, then rows). All three are in the same two processes and take turns, a few steps each, in an order that changes
from round to round; the time is that of the slower rank. The outputs and gradients of all are compared first.

    mlp           512-2048-512, twice, 32 samples         one all-reduce forward and one backward for each pair
    wide mlp      1024-4096-1024, twice, 64 samples       eight times the products for four times the bytes
    attention     8 heads of 64, 4 sequences of 128       queries, keys, values apart
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.placement.turns import (
    milliseconds,
    open_rank,
    raw_ms,
    report,
    slowest,
    take_turns,
    times_as_fast,
    use_peers,
)
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor import TensorParallel
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.training.placement import WholeModel

__all__ = ["main", "measure_rank", "row_of"]

NUM_RANKS, NUM_STEPS = 2, 5
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
    with closing(open_rank()) as group, use_peers(group) as backends:
        peers = {f"DTensor over {name}": peer for name, peer in backends.items()}
        return {case: _measure(case, group, peers, num_rounds) for case in CASES}


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
    steps = {name: partial(_step, model, x) for name, model in models.items()}
    return take_turns(group, steps, num_rounds, num_steps=NUM_STEPS)


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
    values = slowest(ranks)
    row: dict[str, Any] = {"benchmark": "tensor", "case": case, "ranks": NUM_RANKS}
    row |= {f"{name}, ms": milliseconds(seconds) for name, seconds in values.items()}
    row |= {f"{name} / weft": times_as_fast(values[name], values["weft"], bar) for name, bar in BARS.items()}
    return {**row, "raw_ms": raw_ms(values)}


def _measure_all(num_rounds: int, _options: Any) -> list[dict[str, Any]]:
    ranks = run_ranks(RankProgram("benchmarks.placement.tensor:measure_rank", {"num_rounds": num_rounds}), NUM_RANKS)
    return [row_of(case, [rank[case] for rank in ranks]) for case in CASES]


def _show(row: Mapping[str, Any]) -> None:
    print(f"{row['case']}: weft {row['weft, ms'][0]:.2f} ms")
    for name in BARS:
        found, (low, high) = row[f"{name} / weft"], row[f"{name} / weft"]["interval"]
        print(f"  {name}: {row[f'{name}, ms'][0]:.2f} ms, {found['ratio']:.2f} times ({low:.2f} to {high:.2f})")


def main(arguments: Sequence[str] | None = None) -> None:
    report("Time split layers against DTensor.", "tensor", _measure_all, _show, arguments, rounds=20)


if __name__ == "__main__":
    main()
