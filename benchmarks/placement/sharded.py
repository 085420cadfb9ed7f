"""Parameters, gradients and optimizer state split over ranks: Weft's levels 1 to 3 against FSDP2, over Gloo as users
have it and over the backend "weft".

    python -m benchmarks.placement.sharded [--ranks 2 4] [--rounds 10] [--out benchmarks/results/sharded.json]

A GPT of 8 layers, cut by layers on both sides, with AdamW of torch.optim; ranks of one thread each. All systems are in
the same processes and take turns, a few steps each, in an order that changes from round to round; the time is that of
the slowest rank. Level 3 is compared with FSDP2 as it is, which gathers parameters again for backward
(reshard_after_forward), levels 1 and 2 with FSDP2 that keeps them. Losses of all are compared first.

Live bytes are those of one rank while gradients wait for the update, against the formula.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.placement.live_bytes import bytes_kept_by, live_bytes
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.graph import EagerExecutor
from weft.planning.placement_cost import Held, sharded_memory
from weft.specs import Batch, parse_plan
from weft.training.optimizers import TorchOptimizer
from weft.training.replicas import Update

__all__ = ["main", "measure_rank", "row_of"]

NUM_STEPS, WIDTH, NUM_LAYERS, LENGTH, NUM_WORDS = 2, 384, 8, 64, 512
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
    with closing(open_rank()) as group, use_peers(group) as backends:
        batch, held = batch_of(group.rank), dict[str, list[Held]]()
        steps: dict[str, Steps] = {}
        for level in (1, 2, 3):
            name = f"weft level {level}"
            steps[name] = weft_steps(group, level, batch, held.setdefault(name, []))
        for backend, peer in backends.items():
            for reshards in (False, True):
                name = peer_name(backend, reshards)
                steps[name] = peer_steps(peer, batch, held.setdefault(name, []), reshards=reshards)
        _compare_losses({name: [next(own) for _ in range(3)] for name, own in steps.items()})
        turns = {name: partial(next, own) for name, own in steps.items()}
        values = take_turns(group, turns, num_rounds, num_steps=NUM_STEPS)
        parameters = sum(p.nbytes for p in build().parameters())
        return {"values": values, "held": {n: vars(h[-1]) for n, h in held.items()}, "parameters": parameters}


def peer_name(backend: str, reshards: bool) -> str:
    return f"FSDP2 over {backend}{'' if reshards else ', kept'}"


def _compare_losses(losses: Mapping[str, list[float]]) -> None:
    expected = torch.tensor(losses["weft level 1"])
    for found in losses.values():
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)


def row_of(level: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the slowest rank, how many times as fast as each peer Weft is with the interval (95%), and bytes."""
    own, values = f"weft level {level}", slowest([rank["values"] for rank in ranks])
    peers = {backend: peer_name(backend, reshards=level == 3) for backend in PEERS}
    values = {name: values[name] for name in (own, *peers.values())}
    row: dict[str, Any] = {"benchmark": "sharded", "level": level, "ranks": len(ranks)}
    row |= {f"{name.replace(own, 'weft')}, ms": milliseconds(seconds) for name, seconds in values.items()}
    for backend, name in peers.items():
        row[f"{name} / weft"] = times_as_fast(values[name], values[own], PEERS[backend])
    size = ranks[0]["parameters"]
    expected = sharded_memory(level, len(ranks), size, 2 * size)
    row["live_over_formula"] = round(max(Held(**rank["held"][own]).total for rank in ranks) / expected.total, 3)
    bytes_of = {"formula": vars(expected), "live": [rank["held"][own] for rank in ranks]}
    return {**row, "raw_bytes": bytes_of, "raw_ms": raw_ms(values)}


def _measure(num_rounds: int, options: Any) -> list[dict[str, Any]]:
    program = RankProgram("benchmarks.placement.sharded:measure_rank", {"num_rounds": num_rounds})
    return [row_of(level, ranks) for n in options.ranks for ranks in [run_ranks(program, n)] for level in (1, 2, 3)]


def _show(row: Mapping[str, Any]) -> None:
    bytes_of = f"live bytes {row['live_over_formula']} of the formula's"
    print(f"level {row['level']}, {row['ranks']} ranks: weft {row['weft, ms'][0]:.1f} ms, {bytes_of}")
    for backend in PEERS:
        name = peer_name(backend, reshards=row["level"] == 3)
        found, (low, high) = row[f"{name} / weft"], row[f"{name} / weft"]["interval"]
        print(f"  {name}: {row[f'{name}, ms'][0]:.1f} ms, {found['ratio']:.2f} times ({low:.2f} to {high:.2f})")


def main(arguments: Sequence[str] | None = None) -> None:
    report("Time sharded training against FSDP2.", "sharded", _measure, _show, arguments, rounds=10, ranks=2)


if __name__ == "__main__":
    main()
