"""Parameters, gradients and optimizer state split over ranks: Weft's levels 1 to 3 against FSDP2, over Gloo as users
have it and over the backend "weft".

    python -m benchmarks.placement.sharded [--ranks 2] [--rounds 10] [--out benchmarks/results/sharded.json]

A GPT of 8 layers, cut by layers on both sides, with AdamW of torch.optim; ranks of one thread each. All systems are in
the same processes and take turns, a few steps each, in an order that changes from round to round; the time is that of
the slowest rank. Level 3 is compared with FSDP2 as it is, which gathers parameters again for backward
(reshard_after_forward), levels 1 and 2 with FSDP2 that keeps them. Losses of all are compared first.

Live bytes are those of one rank while gradients wait for the update, against the formula.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.atomic import write_json
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.placement.live_bytes import bytes_kept_by, live_bytes
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.graph import EagerExecutor
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.planning.placement_cost import Held, sharded_memory
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.specs import Batch, parse_plan
from weft.training.optimizers import TorchOptimizer
from weft.training.process import keep_freed_memory
from weft.training.replicas import Update

__all__ = ["main", "measure_rank", "row_of"]

RESULTS = Path(__file__).parent.parent / "results" / "sharded.json"
NUM_STEPS, MIN_ROUNDS, WIDTH, NUM_LAYERS, LENGTH, NUM_WORDS = 2, 6, 384, 8, 64, 512
PEERS = {"gloo": 1.3, "weft": 1.0}
"""Backends of FSDP2, and how many times as fast Weft is to be."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return found


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(NUM_WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(NUM_LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.words.weight)


def loss_of(predictions: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(predictions.flatten(0, 1), targets.flatten())


def build() -> GPT:
    torch.manual_seed(0)
    return GPT()


def batch_of(rank: int) -> Batch:
    words = torch.randint(NUM_WORDS, (1, LENGTH + 1), generator=torch.Generator().manual_seed(rank))
    return Batch((words[:, :-1],), (words[:, 1:],))


Steps = Iterator[float]
"""One after the other; each gives its loss, the mean over ranks or this rank's own."""


def weft_steps(group: AbstractGroup, level: int, batch: Batch, held: list[Held]) -> Steps:
    plan = parse_plan(f"shard={group.size} shard_level={level}")
    replicas = replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)
    assert isinstance(replicas, DataParallel)
    placement = replicas.placement
    executor = placement.execute(placement.place(build()), loss_of, EagerExecutor)
    state = executor.initial_state()
    replicas.join(state)
    optimizer = TorchOptimizer(torch.optim.AdamW, lr=1e-3)
    slots = optimizer.init(placement.owned(state.parameters))
    while True:
        outputs, state = executor(state, batch, replicas.begin(1 / group.size))
        update = Update(optimizer, placement.owned(state.parameters), slots, 1e-3, None, placement.norm)
        if len(held) < 2:  # the optimizer makes its state in the first step
            sums = replicas.exchange.wait()[1]
            held.append(live_bytes(replicas, state.parameters, sums, slots))
            slots = update.apply(sums)
            placement.spread(state.parameters)
        else:
            _, slots = replicas.finish(outputs.loss.item() / group.size, update)
        yield outputs.loss.item()


def peer_steps(peer: Any, batch: Batch, held: list[Held], *, reshards: bool) -> Steps:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = build(), DeviceMesh.from_group(peer, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        loss = loss_of(model(*batch.inputs), *batch.targets)
        loss.backward()
        if len(held) < 2:
            held.append(_held_by_peer(model, optimizer))
        optimizer.step()
        yield loss.item()


def _held_by_peer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    def local(tensors: Iterable[Any]) -> int:
        return bytes_kept_by(tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)

    slots = [s for own in optimizer.state.values() for s in own.values() if isinstance(s, Tensor) and s.dim()]
    return Held(local(list(model.parameters())), local([p.grad for p in model.parameters()]), local(slots))


def measure_rank(num_rounds: int) -> dict[str, Any]:
    """The rank program: seconds per step by system, round by round, and live bytes."""
    import torch.distributed as dist

    from weft.distributed.torch_backend import register

    torch.set_num_threads(1)
    keep_freed_memory()
    group = open_group(find_launch(), "shared_memory")
    register()
    store = f"file://{os.environ['WEFT_MEETING']}/peers"
    dist.init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    backends = {"gloo": dist.group.WORLD, "weft": dist.new_group(backend="weft")}
    batch, held = batch_of(group.rank), dict[str, list[Held]]()
    steps: dict[str, Steps] = {}
    for level in (1, 2, 3):
        name = f"weft level {level}"
        steps[name] = weft_steps(group, level, batch, held.setdefault(name, []))
    for backend, peer in backends.items():
        for reshards in (False, True):
            name = peer_name(backend, reshards)
            steps[name] = peer_steps(peer, batch, held.setdefault(name, []), reshards=reshards)
    try:
        _compare_losses({name: [next(own) for _ in range(3)] for name, own in steps.items()})
        values = _take_turns(steps, group, num_rounds)
        parameters = sum(p.nbytes for p in build().parameters())
        return {"values": values, "held": {n: vars(h[-1]) for n, h in held.items()}, "parameters": parameters}
    finally:
        dist.destroy_process_group()
        group.close()


def peer_name(backend: str, reshards: bool) -> str:
    return f"FSDP2 over {backend}{'' if reshards else ', kept'}"


def _compare_losses(losses: Mapping[str, list[float]]) -> None:
    expected = torch.tensor(losses["weft level 1"])
    for found in losses.values():
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def _take_turns(steps: Mapping[str, Steps], group: AbstractGroup, num_rounds: int) -> dict[str, list[float]]:
    values = {name: list[float]() for name in steps}
    names = list(steps)
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            next(steps[name])
            group.barrier()
            began = time.perf_counter()
            for _ in range(NUM_STEPS):
                next(steps[name])
            values[name].append((time.perf_counter() - began) / NUM_STEPS)
    return values


def row_of(level: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the slowest rank, how many times as fast as each peer Weft is with the interval (95%), and bytes."""
    own = f"weft level {level}"
    peers = {backend: peer_name(backend, reshards=level == 3) for backend in PEERS}
    slowest: Callable[[str], list[float]] = lambda name: [  # noqa: E731
        max(several) for several in zip(*(rank["values"][name] for rank in ranks), strict=True)
    ]
    row: dict[str, Any] = {"benchmark": "sharded", "level": level, "ranks": len(ranks)}
    for name in (own, *peers.values()):
        summary = summarise([1e3 * value for value in slowest(name)])
        row[f"{name}, ms"] = [round(x, 2) for x in (summary.median, summary.interval.low, summary.interval.high)]
    for backend, name in peers.items():
        ratio = compare_pairs(slowest(name), slowest(own), METRICS["step_time"])
        bounds = [round(ratio.interval.low, 3), round(ratio.interval.high, 3)]
        row[f"{name} / weft"] = {"ratio": round(ratio.ratio, 3), "interval": bounds, "bar": PEERS[backend]}
    size = ranks[0]["parameters"]
    expected = sharded_memory(level, len(ranks), size, 2 * size)
    row["formula_bytes"] = vars(expected)
    row["live_bytes"] = [rank["held"][own] for rank in ranks]
    row["live_over_formula"] = round(max(Held(**rank["held"][own]).total for rank in ranks) / expected.total, 3)
    row["raw_ms"] = {name: [round(1e3 * value, 3) for value in slowest(name)] for name in (own, *peers.values())}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time sharded training against FSDP2.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS}")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    given = {"num_rounds": max(MIN_ROUNDS, options.rounds)}
    ranks = run_ranks(RankProgram("benchmarks.placement.sharded:measure_rank", given), options.ranks)
    rows = [row_of(level, ranks) for level in (1, 2, 3)]
    for row in rows:
        level = row["level"]
        print(
            f"level {level}: weft {row[f'weft level {level}, ms'][0]:.1f} ms, "
            f"live bytes {row['live_over_formula']} of the formula's"
        )
        for backend in PEERS:
            name = peer_name(backend, reshards=level == 3)
            found, (low, high) = row[f"{name} / weft"], row[f"{name} / weft"]["interval"]
            print(f"  {name}: {row[f'{name}, ms'][0]:.1f} ms, {found['ratio']:.2f} times ({low:.2f} to {high:.2f})")
    if options.out:
        about = {"date": date.today().isoformat(), "machine": describe_machine(), "load_before": load_before}
        versions = {"versions": describe_versions(), "source": describe_source()}
        write_json(options.out, {**about, **versions, "rows": rows})


if __name__ == "__main__":
    main()
